"""Manifest: text and back, required files, missing and damaged files."""

import json
import os

import pytest
from hypothesis import given, settings

from mpidist.checkpoint import manifest
from mpidist.checkpoint.manifest import Contents, Entry, Manifest
from tests.bytes_fuzz import checkpoints

CONTENTS = Contents(optimizer="shards", optimizer_class="Adam", hook="powersgd", rng=True)


SHA = "0123456789abcdef" * 4


def sample(contents=CONTENTS):
    return Manifest(
        7,
        2,
        {name: Entry(3, SHA) for name in manifest.required(2, contents)},
        contents,
        {"torch": "2"},
    )


def test_a_manifest_comes_back():
    assert manifest.from_json(manifest.to_json(sample())) == sample()
    assert sorted(sample().files) == [
        "model.pt",
        "powersgd-0-of-2.pt",
        "powersgd-1-of-2.pt",
        "rank-0-of-2.pt",
        "rank-1-of-2.pt",
        "training.pt",
    ]
    assert manifest.required(2, Contents(optimizer="whole")) == [
        "model.pt",
        "training.pt",
        "optimizer.pt",
    ]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text[: len(text) // 2], "is damaged"),
        (lambda text: "[]", "of format None"),
        (
            lambda text: text.replace("checkpoint 1", "checkpoint 2"),
            "this version of mpidist reads 'mpidist.checkpoint 1'",
        ),
        (lambda text: text.replace('"bytes": 3', '"bytes": "x"', 1), "is damaged: ValueError"),
        (lambda text: text.replace('"bytes"', '"sizes"', 1), "is damaged: KeyError"),
        (lambda text: text.replace('"rng"', '"range"'), "is damaged: TypeError"),
        (lambda text: text.replace('"files": {', '"files": [', 1), "is damaged"),
        (lambda text: text.replace("rank-1-of-2", "rank-2-of-2"), "it lists no rank-1-of-2.pt"),
        (
            lambda text: text.replace(
                '"files": {', '"files": {"../x": {"bytes": 1, "sha256": "' + SHA + '"},'
            ),
            "'../x', no file of",
        ),
        (
            lambda text: text.replace(
                '"files": {', '"files": {"/x": {"bytes": 1, "sha256": "' + SHA + '"},'
            ),
            "'/x', no file of",
        ),
        (
            lambda text: text.replace('"world_size": 2', '"world_size": 1000000000000'),
            "too few for 1000000000000 ranks",
        ),
        (lambda text: text.replace('"world_size": 2', '"world_size": true'), "a number is True"),
        (lambda text: text.replace('"step": 7', '"step": -1'), "a number is -1"),
        (lambda text: text.replace('"bytes": 3', '"bytes": 3.5', 1), r"a number is 3\.5"),
        (lambda text: text.replace(SHA, SHA[:-1], 1), "a sha256 is"),
        (lambda text: text.replace('"shards"', '"other"'), "the optimizer's state is other"),
        (lambda text: text.replace('"rng": true', '"rng": 1'), "of other types"),
        (lambda text: "[" * 100_000, "is damaged"),
    ],
)
def test_a_damaged_one_is_refused(change, words):
    with pytest.raises(ValueError, match=words):
        manifest.from_json(change(manifest.to_json(sample())))


def test_missing_and_damaged_files_are_named():
    expected = {name: Entry(3, "ab") for name in "abcd"}
    found = manifest.problems(expected, {"a": 3, "b": 2, "c": 3, "d": None}, {"a": "ab", "c": "cd"})
    assert [text.split(":")[0] for text in found] == [
        "b has 2 bytes, and was written with 3", "c is damaged", "d is missing",
    ]  # fmt: skip


def test_state_that_is_not_held():
    asked = {"optimizer": 1, "hook_state": 1, "sampler": 1, "scheduler": None, "scaler": None}
    assert manifest.not_held(CONTENTS, asked) == ["sampler"]
    assert json.loads(manifest.to_json(sample()))["contents"]["optimizer_class"] == "Adam"


@settings(max_examples=int(os.environ.get("MPIDIST_FUZZ_CASES", "150")), deadline=None)
@given(checkpoints.manifests())
def test_any_text_is_a_manifest_or_an_error(text):
    checkpoints.check_manifest(text)
