"""What a checkpoint says its weights went through: it does not grow, and proves as much."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

from tests.handles import VerifyReport
from tests.sample_run import SampleRun, record_sample_run
from trinity_buffer import open_store, verify
from trinity_buffer.pipeline.manifest import FIRST_LINK, NAMED_MANIFESTS, ManifestChain, chain
from trinity_buffer.pipeline.train.checkpoint import read_manifest_chain, write_manifest_chain


async def verified(sample: SampleRun, **options: Any) -> VerifyReport:
    async with open_store(sample.url, read_only=True) as store:
        experiment = await store.experiment(sample.name)
        return await verify(experiment, sample.acknowledged, sample.checkpoint, **options)


async def test_the_chain_proves_what_a_checkpoint_does_not_name(
    store_url: str, tmp_path: Path
) -> None:
    sample = await record_sample_run(store_url, tmp_path / "run")
    first, *last = sample.manifests
    said = ManifestChain(len(sample.manifests), ManifestChain().after(first).link, tuple(last))
    write_manifest_chain(sample.checkpoint, said, "")
    report = await verified(sample)
    assert (report.lost, report.duplicated, report.chain) == (0, 0, 2), report
    write_manifest_chain(sample.checkpoint, replace(said, before=FIRST_LINK), "")
    report = await verified(sample, quick=True)
    assert [first.hex() in item for item in report.lost_items] == [True]
    write_manifest_chain(sample.checkpoint, replace(said, before=chain(FIRST_LINK, last[0])), "")
    report = await verified(sample, quick=True)
    assert report.lost_items == ("one of the manifests of the steps 1 to 1",)


async def test_a_step_that_was_trained_again_after_many_is_found(
    store_url: str, tmp_path: Path
) -> None:
    sample = await record_sample_run(store_url, tmp_path / "run")
    before = ManifestChain().after(*sample.manifests).link
    again = ManifestChain(len(sample.manifests) + 1, before, (sample.manifests[0],))
    write_manifest_chain(sample.checkpoint, again, "")
    report = await verified(sample, quick=True)
    assert (report.lost, report.duplicated) == (0, 1), report
    assert sample.manifests[0].hex() in report.duplicated_items[0]


async def test_a_checkpoint_that_a_rewind_superseded_holds(store_url: str, tmp_path: Path) -> None:
    """Its steps were dealt anew since, and went through other manifests then."""
    sample = await record_sample_run(store_url, tmp_path / "run")
    anew = list[bytes]()
    async with open_store(sample.url) as store:
        experiment = await store.experiment(sample.name)
        options: dict[str, Any] = {"strategy": "grpo", "groups_per_step": 1, "resume_from": 0}
        async with experiment.train_stream(drop=["b0/1/0/0/"], **options) as stream:
            async for step in stream:
                anew.append(step.manifest.digest)
                await stream.commit(step)
    assert anew[0] == sample.manifests[0] != anew[1] != sample.manifests[1]
    report = await verified(sample)
    assert report.ok, report
    chain_of_both = ManifestChain().after(*sample.manifests, anew[1])
    write_manifest_chain(sample.checkpoint, chain_of_both, "")
    report = await verified(sample, quick=True)
    assert (report.lost, report.duplicated) == (0, 1), report
    assert anew[1].hex() in report.duplicated_items[0]


def test_what_weights_went_through_does_not_grow_and_does_not_depend_on_pauses(
    tmp_path: Path,
) -> None:
    digests = [number.to_bytes(16) for number in range(NAMED_MANIFESTS + 3)]
    whole = ManifestChain().after(*digests)
    assert whole.link == reduce(chain, digests, FIRST_LINK)
    assert (whole.length, whole.last) == (len(digests), tuple(digests[3:]))
    by_one = ManifestChain()
    for digest in digests:
        by_one = by_one.after(digest)
    assert by_one == whole
    write_manifest_chain(tmp_path, whole, "")
    assert read_manifest_chain(tmp_path) == whole
