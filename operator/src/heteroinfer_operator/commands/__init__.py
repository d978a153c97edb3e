"""Sub-commands of `heteroinfer`: a module each, with add_arguments(parser) and run(arguments)."""
