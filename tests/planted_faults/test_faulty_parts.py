"""Every guarantee's check holds on the package as it is, and fails when its fault is in."""

from __future__ import annotations

import re
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.planted_faults import checks, faulty_parts, trainer_checks

pytestmark = pytest.mark.long  # a minute, in all

Check = Callable[[str, Path], Awaitable[None]]
FaultyPart = Callable[[pytest.MonkeyPatch], None]

CHECKS: list[Check] = [
    checks.acknowledged_is_durable,
    checks.writing_twice_is_writing_once,
    checks.a_crash_before_the_commit_decides_nothing,
    checks.two_of_a_name_decide_once,
    checks.who_lost_its_lease_commits_nothing,
    trainer_checks.a_crashed_trainer_goes_on_where_its_weights_are,
    trainer_checks.a_checkpoint_is_on_the_disk_before_its_commit,
    trainer_checks.a_commit_is_one_event,
    checks.everything_adds_up,
    checks.what_a_filter_drops_is_told,
    trainer_checks.a_replay_serves_the_same_tensors,
    checks.a_slow_writer_hides_nothing,
    trainer_checks.a_newer_token_fences,
    trainer_checks.an_expired_lease_that_nobody_took_commits,
    trainer_checks.nobody_takes_a_lease_between_its_check_and_the_commit,
    checks.bad_input_is_refused_whole,
    checks.what_is_damaged_is_rejected_and_the_rest_is_trained,
    checks.who_is_ahead_waits,
    checks.rejected_groups_hold_back_nobody,
]

# The fault, the check that it turns red, and what that says.
PLANTED: list[tuple[FaultyPart, Check, str]] = [
    (
        faulty_parts.another_content_is_a_duplicate,
        checks.writing_twice_is_writing_once,
        r"DID NOT RAISE.*ConflictingExperienceError",
    ),
    (
        faulty_parts.the_cursor_moves_before_its_output,
        checks.a_crash_before_the_commit_decides_nothing,
        r"== \(8, 0\)",
    ),
    (
        faulty_parts.a_decision_does_not_ask_who_was_first,
        checks.two_of_a_name_decide_once,
        r"was decided twice",
    ),
    (
        faulty_parts.whoever_decided_commits,
        checks.who_lost_its_lease_commits_nothing,
        r"\(4, 1\) == \(4, 2\)",
    ),
    (
        faulty_parts.a_step_is_served_twice,
        trainer_checks.a_crashed_trainer_goes_on_where_its_weights_are,
        r"is not the one that was committed",
    ),
    (
        faulty_parts.uncommitted_steps_are_forgotten,
        trainer_checks.a_crashed_trainer_goes_on_where_its_weights_are,
        r"step 2 was not delivered",
    ),
    (
        faulty_parts.a_resumed_trainer_gets_no_checkpoint,
        trainer_checks.a_crashed_trainer_goes_on_where_its_weights_are,
        r"another chain of manifests than it carries",
    ),
    (
        faulty_parts.the_commit_comes_before_fsync,
        trainer_checks.a_checkpoint_is_on_the_disk_before_its_commit,
        r"manifests.json",
    ),
    (
        faulty_parts.a_commit_is_sent_again_blindly,
        trainer_checks.a_commit_is_one_event,
        r"step 1 was committed before",
    ),
    (faulty_parts.an_event_is_deleted, checks.everything_adds_up, r"there is no event"),
    (
        faulty_parts.a_rejection_is_forgotten,
        checks.what_a_filter_drops_is_told,
        r"rejection: it has 3 rows, the log says 4",
    ),
    (
        faulty_parts.a_replay_has_another_order,
        trainer_checks.a_replay_serves_the_same_tensors,
        r"torch.equal|all\(|False",
    ),
    (
        faulty_parts.a_lease_does_not_fence,
        trainer_checks.a_newer_token_fences,
        r"DID NOT RAISE.*LeaseLostError",
    ),
    (
        faulty_parts.a_lease_is_a_timeout,
        trainer_checks.an_expired_lease_that_nobody_took_commits,
        r"LeaseLostError: expired",
    ),
    (
        faulty_parts.the_door_is_open,
        checks.bad_input_is_refused_whole,
        r"DID NOT RAISE.*InvalidExperienceError",
    ),
    (
        faulty_parts.nobody_looks_at_checksums,
        checks.what_is_damaged_is_rejected_and_the_rest_is_trained,
        r"12, ",
    ),
    (
        faulty_parts.damage_ends_the_stream,
        checks.what_is_damaged_is_rejected_and_the_rest_is_trained,
        r"DamagedSegmentError.*checksum",
    ),
    (faulty_parts.everybody_may_plan, checks.who_is_ahead_waits, r"assert not True"),
    (
        faulty_parts.rejected_groups_hold_a_place,
        checks.rejected_groups_hold_back_nobody,
        r"assert False",
    ),
]
# SQLite has one writer at a time, so that these need no lock there.
PLANTED_ON_POSTGRESQL: list[tuple[FaultyPart, Check, str]] = [
    (
        faulty_parts.positions_come_from_a_sequence,
        checks.a_slow_writer_hides_nothing,
        r"\[1, 3, 4\] == \[1, 2, 3, 4\]",
    ),
    (
        faulty_parts.the_token_is_checked_without_a_lock,
        trainer_checks.nobody_takes_a_lease_between_its_check_and_the_commit,
        r"\[False\] == \[True\]",
    ),
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_the_guarantee_holds(check: Check, store_url: str, tmp_path: Path) -> None:
    await check(store_url, tmp_path)


async def red(check: Check, url: str, folder: Path, said: str) -> None:
    """Return if the check fails and says so; a check that stays green is of no use."""
    # pytest's own failures are no Exception.
    with pytest.raises(BaseException) as failure:  # noqa: PT011
        await check(url, folder)
    told = "".join(traceback.format_exception_only(_innermost(failure.value)))
    assert re.search(said, told), told


def _innermost(failure: BaseException) -> BaseException:
    if isinstance(failure, BaseExceptionGroup):
        return _innermost(failure.exceptions[0])
    return failure


def _name(value: object) -> str:
    return getattr(value, "__name__", "")


@pytest.mark.parametrize(("part", "check", "said"), PLANTED, ids=_name)
async def test_the_fault_is_found(
    part: FaultyPart,
    check: Check,
    said: str,
    new_sqlite_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    part(monkeypatch)
    await red(check, new_sqlite_url, tmp_path, said)


@pytest.mark.parametrize(("part", "check", "said"), PLANTED_ON_POSTGRESQL, ids=_name)
async def test_the_fault_is_found_on_postgresql(
    part: FaultyPart,
    check: Check,
    said: str,
    postgres_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    part(monkeypatch)
    await red(check, postgres_url, tmp_path, said)


async def test_a_receipt_before_the_commit_is_found(store_url: str, tmp_path: Path) -> None:
    await red(
        checks.acknowledged_is_durable_though_told_too_early,
        store_url,
        tmp_path,
        "lost|experience|in this log|no event has it",
    )


def test_every_faulty_part_is_put_in() -> None:
    made = {
        value
        for name, value in vars(faulty_parts).items()
        if getattr(value, "__module__", "") == faulty_parts.__name__ and callable(value)
    }
    assert made == {part for part, _, _ in PLANTED + PLANTED_ON_POSTGRESQL}
