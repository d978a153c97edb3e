"""Output that arrives in pieces becomes lines, in bounded memory."""

from vllm_heteroinfer.calibration.process_output import MAX_LINE_BYTES, LineReader


def lines_of(*pieces: bytes) -> list[str]:
    found: list[str] = []
    reader = LineReader(found.append)
    for piece in pieces:
        reader.feed(piece)
    return found


def test_joins_lines_that_arrive_in_pieces() -> None:
    assert lines_of(b"on", b"e\ntwo\n\nth", b"ree") == ["one", "two", ""]
    assert lines_of(b"on", b"e\ntwo\n\nth", b"ree", b"") == ["one", "two", "", "three"]
    assert lines_of(b"") == []
    assert lines_of(b"\xff\n") == ["\ufffd"]


def test_a_line_without_an_end_is_cut() -> None:
    long, short = lines_of(*[b"x" * 100_000] * 100, b"\nnext\n")
    assert (len(long), short) == (MAX_LINE_BYTES, "next")
