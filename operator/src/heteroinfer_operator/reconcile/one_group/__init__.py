"""What one group needs: the order of the questions, and an answer to each. Pure."""
