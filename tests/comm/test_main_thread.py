"""Line of the main thread: the user's place, and the innermost frame."""

import sysconfig
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import mpidist
from mpidist.comm import main_thread

STANDARD = sysconfig.get_path("stdlib")
INSTALLED = sysconfig.get_path("purelib")
OURS = str(Path(mpidist.__file__).parent)
TORCH = str(Path(torch.__file__).parent)


def described(*files):
    """Return the line of a stack whose frames are in these files, the innermost last."""
    frame = None
    for place, file in enumerate(files, 1):
        code = SimpleNamespace(co_filename=file, co_name=f"level{place}")
        frame = SimpleNamespace(f_back=frame, f_code=code, f_lineno=2)
    return main_thread.describe(frame)


@pytest.mark.parametrize(
    ("files", "line"),
    [
        (["/home/me/train.py"], "/home/me/train.py:2 in level1()"),
        (
            ["/home/me/train.py", f"{TORCH}/nn/x.py", f"{OURS}/comm/work.py"],
            "/home/me/train.py:2 in level1(), within mpidist/comm/work.py:2 in level3()",
        ),
        # A data loader's wait ends in Python's own modules.
        (
            ["/home/me/train.py", f"{TORCH}/utils/x.py", f"{STANDARD}/selectors.py"],
            "/home/me/train.py:2 in level1(), within selectors.py:2 in level3()",
        ),
        # A framework's program: there is no file of the user's.
        (
            ["<frozen runpy>", f"{INSTALLED}/trainer/loop.py", f"{OURS}/ddp/module.py"],
            "trainer/loop.py:2 in level2(), within mpidist/ddp/module.py:2 in level3()",
        ),
        ([f"{OURS}/cli/app.py"], "mpidist/cli/app.py:2 in level1()"),
        (["<string>"], "<string>:2 in level1()"),
        (["/x" * 100 + "/train.py"], "..." + ("/x" * 100 + "/train.py")[-80:] + ":2 in level1()"),
    ],
)
def test_the_innermost_frame_of_the_users_is_named(files, line):
    assert described(*files) == line


def test_another_thread_reads_the_main_thread():
    lines = []
    thread = threading.Thread(target=lambda: lines.append(main_thread.line()))
    thread.start()
    thread.join()
    assert "test_main_thread.py:" in lines[0]
    assert "test_another_thread_reads_the_main_thread()" in lines[0]
    assert "within threading.py:" in lines[0]
