"""Files that an episode starts with."""

from pathlib import Path

import pytest

from agentrt.sandbox.files import put


def test_texts_go_to_their_paths_byte_for_byte(tmp_path: Path) -> None:
    put(tmp_path, {"a.txt": "é\r\n", "b/c/d.txt": "", "b/e.txt": "x"})
    assert (tmp_path / "a.txt").read_bytes() == "é\r\n".encode()
    found = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert found == {"a.txt", "b/c/d.txt", "b/e.txt"}


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x", "", "a\0"])
def test_a_path_that_leads_out_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no path inside the episode's folder"):
        put(tmp_path, {name: ""})
    assert list(tmp_path.iterdir()) == []


def test_a_path_through_a_file_and_what_is_no_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'a/b' is below 'a', which is a file too"):
        put(tmp_path, {"a/b": "", "a": ""})
    with pytest.raises(ValueError, match="'a' is a bytes, not a text"):
        put(tmp_path, {"a": b"x"})  # type: ignore[dict-item]
    assert list(tmp_path.iterdir()) == []
