"""What every command owes to a user's mistake."""

from dflash.command import REFUSED


def assert_refused(code: int, stderr: str, value: str, remedy: str) -> None:
    """Exit code 2, and one line at the end that names value and remedy; no traceback, no usage."""
    assert code == REFUSED, stderr
    *noise, line = stderr.splitlines()  # the noise is of libraries, such as a bar of the weights that were loaded
    assert line.startswith("dflash: "), stderr
    assert value in line, line
    assert remedy in line, line
    assert not any(text.startswith(("dflash", "usage", "Traceback")) for text in noise), stderr
    assert "[Errno" not in line, line
    assert len(line) < 600, line  # what a person still reads
