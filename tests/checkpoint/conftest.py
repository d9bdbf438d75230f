"""Fixture of one folder for all ranks."""

import pytest


@pytest.fixture
def folder(group, tmp_path_factory):
    return type(tmp_path_factory.getbasetemp())(
        group.broadcast_object(str(tmp_path_factory.mktemp("run")) if group.rank == 0 else None, 0)
    )
