"""Tests that a rank names each damaged, changed or missing file of a checkpoint, and the fix."""

from tests.integration.kernels.probe_answers import ask_forked


def test_damaged_and_changed_files_are_reported() -> None:
    answers = ask_forked("tests.integration.feed_forward.files_probe")
    assert answers.pop("whole") == answers.pop("link") == ""
    for name, fix in {
        "unknown type": "Use spec.parallelism.mode: Pipeline",
        "written to meanwhile": "Keep the model's files as they are until the group is ready",
        "another model's": "Give all pods of the group the same model folder",
    }.items():
        assert answers.pop(name).endswith(fix)
    assert len(answers) == 18
    for name, text in answers.items():
        assert f"/{name}: " in text, name
        assert text.lower().count("download the model again") == 1, (name, text)
