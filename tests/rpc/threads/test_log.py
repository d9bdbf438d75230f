"""Logger of RPC: what a user's handler raises is printed, and an interrupt is not kept."""

import logging

import pytest

from mpidist.rpc.threads.log import logger


@pytest.fixture
def raising():
    class Handler(logging.Handler):
        error = RuntimeError("the disk is full")

        def emit(self, record):
            raise self.error

    handler = Handler()
    logger.logger.addHandler(handler)
    yield handler
    logger.logger.removeHandler(handler)


@pytest.mark.parametrize("kind", [RuntimeError, SystemExit, GeneratorExit])
def test_what_a_handler_raises_is_printed(raising, capfd, kind):
    raising.error = kind("the disk is full")
    for log in (logger.warning, logger.error, logger.exception):
        log("%s of %s", 1, 2)
    assert capfd.readouterr().err.count(f"{kind.__name__}: the disk is full") == 3


def test_an_interrupt_goes_on(raising):
    raising.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        logger.error("a record")


def test_a_record_has_the_line_of_its_caller(caplog):
    logger.warning("here")
    assert caplog.records[-1].filename == "test_log.py"
