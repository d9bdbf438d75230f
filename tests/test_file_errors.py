"""Names of files in errors of the operating system."""

import errno
import os

import pytest

from mpidist.file_errors import naming


@pytest.mark.parametrize("size", [1, 1 << 20])
def test_a_write_that_fails_has_its_file(size):
    text = "No space left on device: '/dev/full'"
    with pytest.raises(OSError, match=text), naming("/dev/full"), open("/dev/full", "wb") as file:
        file.write(bytes(size))


def test_other_names_and_other_errors_stay(tmp_path):
    with pytest.raises(FileNotFoundError, match="there") as missing, naming(tmp_path):
        os.open(tmp_path / "there", os.O_RDONLY)
    assert missing.value.errno == errno.ENOENT
    with pytest.raises(OSError, match=r"^no number$"), naming(tmp_path):
        raise OSError("no number")
    with pytest.raises(ValueError, match=r"^other$"), naming(tmp_path):
        raise ValueError("other")
