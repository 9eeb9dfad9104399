"""The manifest of published weights: it names the files of one step, whatever ends a publication."""

import json

import pytest

from finetune.model_files.manifest import MANIFEST
from finetune.model_files.published import is_as_published, manifest_of
from finetune.safetensors_io import digest_of
from tests.checkpoint.test_store import Faults
from tests.support import cases, sharded_checkpoint_cases


class Stopped(Exception):
    """What ends a publication at one of its writes."""


def stop():
    raise Stopped


def test_every_published_file_is_named_with_its_digest(plain_run, tmp_path):
    plain_run(max_steps=2, eval_every=1, validation_split=0.2)
    for folder in (tmp_path / "out", tmp_path / "out" / "best"):
        manifest = json.loads((folder / MANIFEST).read_text())
        assert {"adapter_model.safetensors", "adapter_config.json", "base_model.json"} <= set(manifest["files"])
        for name, entry in manifest["files"].items():
            assert entry == {"size": (folder / name).stat().st_size, "sha256": digest_of(folder / name)}
    assert "tokenizer.json" in json.loads((tmp_path / "out" / MANIFEST).read_text())["files"]
    assert json.loads((tmp_path / "out" / MANIFEST).read_text())["step"] == 2


@pytest.mark.parametrize("name", ["head.json", "preprocessor_config.json", "processor_config.json"])
def test_what_names_labels_and_makes_pixels_is_named_too(tmp_path, name):
    (tmp_path / "config.json").write_text("{}")
    before = manifest_of(tmp_path, 1, "run")
    (tmp_path / name).write_text('{"a": 1}')
    (tmp_path / MANIFEST).write_text(manifest_of(tmp_path, 1, "run"))
    assert is_as_published(tmp_path)
    (tmp_path / name).write_text('{"a": 2}')
    assert not is_as_published(tmp_path)
    (tmp_path / MANIFEST).write_text(before)  # of an earlier version, which named it not
    assert is_as_published(tmp_path)


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_stopped_at_any_call_of_a_publication_no_manifest_names_files_of_two_steps(tmp_path, kind):
    groups = sharded_checkpoint_cases.groups_of(0, 1, "alone")
    engine = cases.build(cases.CASES[kind], groups)
    with sharded_checkpoint_cases.directory(engine, tmp_path, {"adapter_config.json": {}}) as writer:
        writer.publish(engine, 0)
        weights = next(tmp_path.glob("*model.safetensors"))
        points, left_without, before = 0, 0, digest_of(weights)
        while True:
            points += 1
            sharded_checkpoint_cases.steps(engine, 1)
            try:
                with pytest.MonkeyPatch.context() as patch:
                    Faults(patch, points, stop)
                    writer.publish(engine, points)
                break
            except Stopped:
                assert is_as_published(tmp_path), points
                if (tmp_path / MANIFEST).exists():
                    step = json.loads((tmp_path / MANIFEST).read_text())["step"]
                    assert step == points or digest_of(weights) == before
                left_without += not (tmp_path / MANIFEST).exists()
            writer.publish(engine, points)
            before = digest_of(weights)
        assert points > 5 and left_without > 2 and is_as_published(tmp_path)
