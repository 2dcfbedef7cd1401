"""Faults at the edges: what somebody who wants a bug to survive would change in the package.

Each is a change of the text of one file, and the fast test that turns red under it. `faulty` makes
the changes in a copy of the repository; `docs/faults.md` shows them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Attributes:
        what: what is wrong under it, for `docs/faults.md`.
        file: path in the package.
        old, new: the text that is there once, and what takes its place.
        test: file and function that turn red.
    """

    what: str
    file: str
    old: str
    new: str
    test: str

    @property
    def package(self) -> str:
        """The part of the package that it is in."""
        return self.file.rpartition("/")[0] or self.file.removesuffix(".py")


FAULTS = [
    Fault(
        "verify drops the spans that are full",
        "store/auditing/expectation.py",
        "            self._full.append(part)\n",
        "",
        "tests/pipeline/test_sizes.py::test_a_changed_row_of_an_early_span_is_found",
    ),
    Fault(
        "a log that is read again ends after its first page",
        "pipeline/history/refold.py",
        "        if len(page) < limit:\n            return",
        "        return",
        "tests/pipeline/test_sizes.py::test_a_log_is_folded_before_the_lock_and_not_under_it",
    ),
    Fault(
        "verify skips every full block of segments",
        "pipeline/verifying/segment_audit.py",
        "            yield some\n            some, total",
        "            some, total",
        "tests/pipeline/test_sizes.py::test_each_damaged_segment_is_named",
    ),
    Fault(
        "a strategy passes over what lies beyond its page of events",
        "pipeline/annotating/unit_reader.py",
        "page[-1].position if len(page) == limit else head",
        "head",
        "tests/pipeline/test_sizes.py::test_a_run_of_small_pages_comes_to_the_same",
    ),
    Fault(
        "compaction asks of a segment for its first row alone",
        "store/retention.py",
        "left[place] <= one.last",
        "left[place] <= one.first",
        "tests/pipeline/test_sizes.py::test_what_may_leave_does_not_depend_on_the_page",
    ),
    Fault(
        "compaction ends after its first page",
        "pipeline/history/compaction.py",
        "            after = held[-1].last\n",
        "            break\n",
        "tests/pipeline/test_sizes.py::test_what_may_leave_does_not_depend_on_the_page",
    ),
    Fault(
        "a rebuild holds the write lock throughout",
        "pipeline/history/rebuild.py",
        "    with scratch_for(database, experiment) as scratch:\n",
        "    with scratch_for(database, experiment) as scratch, database._connect() as held:\n        held.execute('BEGIN IMMEDIATE')\n",  # noqa: E501 - a text of the package
        "tests/pipeline/test_sizes.py::test_a_rebuild_lets_others_write_at_every_stage",
    ),
    Fault(
        "a commit is not told to those who wait in its process",
        "store/database.py",
        "        self._changes.notify()\n",
        "",
        "tests/store/test_changes.py::test_a_commit_of_this_process_is_told_to_it_and_not_looked_for",
    ),
    Fault(
        "two sessions at once, without the write lock",
        "store/sqlite_seats.py",
        "        if not writes:\n",
        "        if True:\n",
        "tests/contract/test_sessions.py::test_on_sqlite_a_second_session_begins_when_the_first_is_over",
    ),
    Fault(
        "the first row of a page of ready rows is passed over",
        "store/trainer_queries.py",
        'annotation.c.address >= bindparam("start")',
        'annotation.c.address > bindparam("start")',
        "tests/contract/test_ready_rows.py::test_events_of_a_single_row_are_all_found",
    ),
    Fault(
        "memory of a write is used again while somebody looks at it",
        "pipeline/reused_memory.py",
        "        return True\n",
        "        return False\n",
        "tests/pipeline/test_reused_memory.py::test_what_somebody_looks_at_is_not_given_to_another",
    ),
    Fault(
        "of a long blob the last piece is not filled in",
        "store/sqlite_seats.py",
        "for piece in blob.pieces:",
        "for piece in blob.pieces[:1]:",
        "tests/store/test_long_blobs.py::test_blobs_of_any_size_and_in_any_pieces_come_back",
    ),
    Fault(
        "who was prepared ahead hears of a busy store and is written all the same",
        "pipeline/writing/group_commit.py",
        "ahead, self._ahead = self._ahead, None",
        "ahead = self._ahead",
        "tests/contract/test_overlapping.py::test_who_was_prepared_ahead_hears_that_the_store_is_busy_and_is_not_written",
    ),
    Fault(
        "the last rows, which fill no statement, lose one",
        "store/sqlite_seats.py",
        "rows[whole:])",
        "rows[whole + 1 :])",
        "tests/contract/test_sessions.py::test_any_number_of_rows_is_added_each_once",
    ),
    Fault(
        "a part that is missing in the middle of a segment is not missed",
        "store/segments.py",
        "if part != expected or not _holds(",
        "if not _holds(",
        "tests/store/test_segment_parts.py::test_a_part_that_is_missing_before_the_last_is_damage",
    ),
    Fault(
        "of the newest groups the second page is lost",
        "store/asking/inspection.py",
        "        before = int(rows[-1].address)\n",
        "        break\n",
        "tests/pipeline/test_sizes.py::test_the_newest_groups_are_found_on_every_page",
    ),
    Fault(
        "the row after the last is the first",
        "codec/columns.py",
        "-len(self) <= index < len(self)",
        "-len(self) <= index <= len(self)",
        "tests/codec/test_segments.py::test_objects_come_back_row_by_row",
    ),
    Fault(
        "an object of one byte is none",
        "codec/columns.py",
        "if ends[row] < ends[row + 1]",
        "if ends[row] + 1 < ends[row + 1]",
        "tests/codec/test_segments.py::test_objects_come_back_row_by_row",
    ),
    Fault(
        "bytes behind the last column are not noticed",
        "codec/segments.py",
        "if end_of_body != len(view) or",
        "if end_of_body > len(view) or",
        "tests/codec/test_segments.py::test_a_blob_with_a_tail_is_a_codec_error",
    ),
    Fault(
        "the next version is read as if it were this one",
        "codec/segments.py",
        "if version > SEGMENT_VERSION:",
        "if version > SEGMENT_VERSION + 1:",
        "tests/codec/test_segments.py::test_a_newer_segment_says_upgrade",
    ),
    Fault(
        "two columns may share bytes",
        "codec/segments.py",
        "if offset < used or offset + size",
        "if offset + size",
        "tests/codec/test_segments.py::test_a_header_that_lies_is_a_codec_error",
    ),
    Fault(
        "run 0 of a task is never missing",
        "pipeline/writing/planning.py",
        "for run in range(planned.rollouts_per_group)]",
        "for run in range(1, planned.rollouts_per_group)]",
        "tests/contract/test_planning.py::test_what_is_missing_of_a_plan_shrinks_as_runs_are_stored",
    ),
    Fault(
        "a plan of no rollouts is taken",
        "pipeline/writing/planning.py",
        "not 1 <= rollouts_per_group",
        "not 0 <= rollouts_per_group",
        "tests/contract/test_planning.py::test_an_impossible_plan_is_refused",
    ),
    Fault(
        "one group too many waits for the trainer",
        "pipeline/writing/planning.py",
        "if self.max_waiting_groups is not None and backlog.undelivered >= self",
        "if self.max_waiting_groups is not None and backlog.undelivered > self",
        "tests/contract/test_planning.py::test_admission_is_what_the_formula_says",
    ),
    Fault(
        "who takes over reads one page of what waits",
        "pipeline/annotating/unit_reader.py",
        "        return addresses[-1]\n",
        "        return None\n",
        "tests/pipeline/test_sizes.py::test_who_takes_over_finds_all_that_waits",
    ),
    Fault(
        "who takes over passes over a waiting row at each end of a page",
        "pipeline/annotating/unit_reader.py",
        "        return addresses[-1]\n",
        "        return addresses[-1] + 1\n",
        "tests/pipeline/test_sizes.py::test_who_takes_over_finds_all_that_waits",
    ),
    Fault(
        "a group whose deadline is now stays open",
        "pipeline/annotating/grouping.py",
        "end_us is not None and end_us <= now_us",
        "end_us is not None and end_us < now_us",
        "tests/pipeline/test_grouping.py::test_the_deadline_of_one_group_closes_a_batch",
    ),
    Fault(
        "a batch is forgotten as soon as one of its groups is decided",
        "pipeline/annotating/grouping.py",
        "if all(group.decided for group in batch.groups.values())",
        "if any(group.decided for group in batch.groups.values())",
        "tests/pipeline/test_grouping.py::test_a_group_is_ready_when_its_planned_runs_are_there",
    ),
    Fault(
        "rows are scored in the order in which they came",
        "pipeline/annotating/reward_table.py",
        "np.lexsort([*by, *map(np.array, texts), group])",
        'np.argsort(group, kind="stable")',
        "tests/pipeline/test_reward_table.py::test_both_roads_commit_the_same_bits",
    ),
    Fault(
        "a mask that selects nothing is given its score",
        "pipeline/annotating/reward_table.py",
        "    found[nothing] = np.copysign(np.float32(0), found[nothing])\n",
        "",
        "tests/pipeline/test_reward_table.py::test_both_roads_commit_the_same_bits",
    ),
    Fault(
        "rewards per token are dropped where one number stands for a row",
        "codec/columns.py",
        "return plain and not any(columns.get(field) for field in ANNOTATED)",
        "return plain",
        "tests/pipeline/test_reward_table.py::test_what_one_number_cannot_say_is_read",
    ),
    Fault(
        "a subclass that changes something is scored as its base",
        "algorithm/reward_scores.py",
        "for name in own):\n            return False",
        "for name in own):\n            continue",
        "tests/pipeline/test_reward_declarations.py::test_a_class_is_scored_by_rewards_only_as_long_as_its_declaration_tells_all",
    ),
    Fault(
        "verify believes that one number can stand for a row",
        "pipeline/verifying/segment_audit.py",
        "if fact.scorable and not is_scorable(",
        "if False and not is_scorable(",
        "tests/pipeline/test_reward_table.py::test_an_event_that_wrongly_says_that_numbers_can_stand_for_its_rows_is_named",
    ),
    Fault(
        "a strategy that is behind makes small commits",
        "pipeline/annotating/strategy_consumer.py",
        "in_step = live and not self._reader.behind",
        "in_step = live",
        "tests/pipeline/test_strategy_consumer.py::test_commits_are_small_only_where_a_trainer_may_wait_for_them",
    ),
    Fault(
        "the bound for negative advantages holds for all",
        "algorithm/policy_loss_fn/ppo_policy_loss.py",
        "torch.where(negative, torch.minimum(bound, worse), worse)",
        "torch.minimum(bound, worse)",
        "tests/algorithm/losses/test_edges.py::test_the_bound_of_a_ratio_holds_for_negative_advantages_alone",
    ),
    Fault(
        "a ratio bound of 1 is taken",
        "algorithm/policy_loss_fn/ppo_policy_loss.py",
        "if not clip_ratio_c > 1.0:",
        "if not clip_ratio_c >= 1.0:",
        "tests/algorithm/losses/test_formulas.py::test_an_argument_that_cannot_be_right_is_refused_by_name",
    ),
    Fault(
        "an advantage at the threshold is a success",
        "algorithm/policy_loss_fn/topr_policy_loss.py",
        "advantages <= self.advantage_threshold",
        "advantages < self.advantage_threshold",
        "tests/algorithm/losses/test_edges.py::test_topr_takes_an_advantage_at_its_threshold_for_a_failure",
    ),
    Fault(
        "a pair of DPO with equal rewards is a right answer",
        "algorithm/policy_loss_fn/dpo_loss.py",
        "(chosen > rejected)",
        "(chosen >= rejected)",
        "tests/algorithm/losses/test_edges.py::test_a_pair_of_equal_rewards_is_not_won",
    ),
    Fault(
        "CISPO leaves out a token without an advantage",
        "algorithm/policy_loss_fn/cispo_policy_loss.py",
        "(advantages > 0)",
        "(advantages >= 0)",
        "tests/algorithm/losses/test_edges.py::test_cispo_lets_a_token_without_an_advantage_be_whatever_its_ratio",
    ),
    Fault(
        "RLOO scores a group of one with zero",
        "algorithm/advantage_fn/rloo_advantage.py",
        "rewards if size == 1 else",
        "rewards * 0 if size == 1 else",
        "tests/algorithm/strategies/test_edges.py::test_rloo_scores_a_group_of_one_with_its_reward",
    ),
    Fault(
        "a reward on the last token, which the mask leaves out, is lost",
        "algorithm/advantage_fn/token_scores.py",
        "        here = rewards[..., t] + pending\n        delta",
        "        here = rewards[..., t]\n        delta",
        "tests/algorithm/strategies/test_trainer_advantages.py::test_ppo_counts_a_reward_on_a_token_of_the_environment_for_the_action_before_it",
    ),
    Fault(
        "a return begins before the last token",
        "algorithm/advantage_fn/token_scores.py",
        "for t in reversed(range(rewards.shape[-1])):",
        "for t in reversed(range(rewards.shape[-1] - 1)):",
        "tests/algorithm/strategies/test_edges.py::test_returns_begin_at_the_last_token",
    ),
    Fault(
        "the value after an environment's token is that token's",
        "algorithm/advantage_fn/token_scores.py",
        "next_value = values[..., t].where(acts, next_value)",
        "next_value = values[..., t]",
        "tests/algorithm/strategies/test_trainer_advantages.py::test_time_passes_only_at_action_tokens",
    ),
    Fault(
        "the deviation of one row is not a number",
        "algorithm/advantage_fn/rows.py",
        "(squares / (count - ddof).clamp(min=1.0)).where(count > ddof, 0.0)",
        "squares / (count - ddof)",
        "tests/algorithm/strategies/test_edges.py::test_one_row_has_no_deviation",
    ),
    Fault(
        "an outcome at the threshold is right",
        "algorithm/add_strategy/filters.py",
        "of_runs > self.correct_threshold",
        "of_runs >= self.correct_threshold",
        "tests/algorithm/strategies/test_edges.py::test_an_outcome_at_the_threshold_is_wrong_and_one_success_is_enough",
    ),
    Fault(
        "a group with as few successes as are enough is left out",
        "algorithm/add_strategy/filters.py",
        "if correct < self.min_correct:",
        "if correct <= self.min_correct:",
        "tests/algorithm/strategies/test_edges.py::test_an_outcome_at_the_threshold_is_wrong_and_one_success_is_enough",
    ),
    Fault(
        "of equal rewards the later run is kept",
        "algorithm/add_strategy/filters.py",
        'np.argsort(-rewards, axis=-1, kind="stable")[',
        'rewards.shape[1] - 1 - np.argsort(-rewards[:, ::-1], axis=-1, kind="stable")[',
        "tests/algorithm/strategies/test_edges.py::test_of_equal_rewards_the_earlier_run_is_kept",
    ),
    Fault(
        "a run at the least reward is left out",
        "algorithm/add_strategy/filters.py",
        "(rewards >= self.min_reward)",
        "(rewards > self.min_reward)",
        "tests/algorithm/strategies/test_edges.py::test_a_run_at_the_least_reward_is_kept",
    ),
    Fault(
        "the last copy of a batch is one too many",
        "algorithm/add_strategy/duplicate_add_strategy.py",
        "while kept and written < target:",
        "while kept and written <= target:",
        "tests/algorithm/strategies/test_edges.py::test_a_batch_that_is_full_gets_no_copy",
    ),
    Fault(
        "a write of nothing is a group",
        "writer.py",
        "        if experiences:\n            self.groups.append",
        "        if True:\n            self.groups.append",
        "tests/test_writer.py::test_a_write_of_nothing_is_no_group",
    ),
    Fault(
        "a group changes with the list that was written",
        "writer.py",
        "self.groups.append(list(experiences))",
        "self.groups.append(experiences)  # type: ignore",
        "tests/test_writer.py::test_a_write_is_a_group_that_later_changes_of_the_list_leave_alone",
    ),
    Fault(
        "a second rejection replaces the first",
        "writer.py",
        "self.rejections.extend((experience, reason) for experience in experiences)",
        "self.rejections = [(experience, reason) for experience in experiences]",
        "tests/test_writer.py::test_rejections_add_up_in_their_order",
    ),
    Fault(
        "the receipt of a strategy names no experience",
        "writer.py",
        "tuple(e.eid.uid for e in experiences))",
        "())",
        "tests/test_writer.py::test_a_write_is_a_group_that_later_changes_of_the_list_leave_alone",
    ),
    Fault(
        "a writer without plans takes one in silence",
        "writer.py",
        '        """Record what a batch will hold, before it is generated; wait until there is room."""\n        raise InvalidArgumentError(_NO_PLANS.format(batch, type(self).__name__))',  # noqa: E501 - a text of the package
        "        return True",
        "tests/test_writer.py::test_a_writer_without_plans_says_so",
    ),
    Fault(
        "a micro-batch that just fills its budget is cut in two",
        "pipeline/proof/manifest.py",
        "size * computed > budget",
        "size * computed >= budget",
        "tests/pipeline/test_edges.py::test_a_micro_batch_may_just_fill_its_budget",
    ),
    Fault(
        "a row of just as many tokens as are allowed is too long",
        "pipeline/streaming/step_sampler.py",
        "[size <= limit for size in group.lengths]",
        "[size < limit for size in group.lengths]",
        "tests/pipeline/test_edges.py::test_a_row_of_just_as_many_tokens_as_are_allowed_is_trained",
    ),
    Fault(
        "a step that was handed out and not committed is numbered again",
        "pipeline/streaming/leading_rank.py",
        "self._next_step = row.leased_step + 1",
        "self._next_step = row.committed_step + 1",
        "tests/contract/test_committing.py::test_what_was_not_committed_is_served_as_recorded_whatever_is_asked_now",
    ),
    Fault(
        "the last step of a checkpoint is not asked for",
        "pipeline/verifying/outside.py",
        "if unknown < step <= last and digest not in times",
        "if unknown < step < last and digest not in times",
        "tests/pipeline/test_verify.py::test_a_committed_step_that_the_weights_did_not_go_through_is_lost",
    ),
    Fault(
        "what a checkpoint does not name is taken as proven",
        "pipeline/verifying/outside.py",
        '    lost = [f"one of the manifests of the steps 1 to {unknown}"] if unknown else []\n',
        "    lost: list[str] = []\n",
        "tests/pipeline/test_gone_through.py::test_the_chain_proves_what_a_checkpoint_does_not_name",
    ),
    Fault(
        "a commit whose answer was lost is sent again, though it stands in the log",
        "store/postgres.py",
        "            self._doubted = dict(tx.appended)\n",
        "            pass\n",
        "tests/store/test_server_away.py::test_a_commit_whose_answer_was_lost_is_looked_for_and_not_sent_again_blindly",
    ),
    Fault(
        "batches of a server are asked for in two statements, which it joins row by row",
        "store/queries.py",
        '    if dialect == "sqlite":\n        # In two',
        "    if dialect:\n        # In two",
        "tests/store/test_never_analyzed.py::test_without_statistics_no_question_compares_every_row_with_every_other",
    ),
    Fault(
        "two changes of one row travel together, and PostgreSQL makes one of them",
        "store/postgres.py",
        "        if table in self._changes:\n            self._catch_up()\n",
        "",
        "tests/store/test_trips.py::test_changes_of_one_row_are_made_in_order",
    ),
    Fault(
        "two manifests with a row in common are no repetition",
        "pipeline/verifying/outside.py",
        "    twice |= _sharing_rows(known)\n",
        "",
        "tests/pipeline/test_verify.py::test_two_manifests_with_one_row_are_a_row_trained_twice",
    ),
    Fault(
        "a step that was handed out and not committed cannot be replayed",
        "pipeline/history/replay.py",
        "<= last <= row.leased_step:",
        "<= last <= row.committed_step:",
        "tests/pipeline/test_edges.py::test_a_replay_from_the_middle_has_the_chain_of_the_whole",
    ),
    Fault(
        "the last committed step is shown as leased",
        "inspect/fates.py",
        "<= trainers[one.consumer].committed_step",
        "< trainers[one.consumer].committed_step",
        "tests/cli/test_asking.py::test_groups_show_rewards_advantages_and_fates",
    ),
    Fault(
        "a run of several steps counts as several runs",
        "inspect/group_views.py",
        "missing = len(set(range(rollouts)) - {run.run for run in runs})",
        "missing = max(0, rollouts - len(runs))",
        "tests/inspect/test_edges.py::test_a_run_of_several_steps_is_one_run",
    ),
    Fault(
        "of an experience's copies the first alone is told",
        "inspect/fates.py",
        "dict.fromkeys(_told(row, untaken) for row in self.annotations)",
        "[_told(self.annotations[0], untaken)]",
        "tests/inspect/test_edges.py::test_a_fate_tells_of_every_copy_once",
    ),
    Fault(
        "the oldest checkpoint to keep is removed",
        "trainer/checkpoint_folder.py",
        "gone = kept and (step < kept[0] or",
        "gone = kept and (step <= kept[0] or",
        "tests/trainer/test_checkpoint_folder.py::test_the_newest_steps_stay_and_what_was_begun_before_the_commit_goes",
    ),
    Fault(
        "a step that a rewind goes back to counts as superseded",
        "pipeline/verifying/trainer_audit.py",
        "if step <= kept}",
        "if step < kept}",
        "tests/contract/test_committing.py::test_an_older_checkpoint_is_gone_on_from_and_later_steps_are_superseded",
    ),
    Fault(
        "two annotation sets are compared on their first page alone",
        "inspect/compare.py",
        "        yield found, position_of(after)\n",
        "        yield found, position_of(after)\n        return\n",
        "tests/inspect/test_edges.py::test_two_sets_are_compared_over_every_page",
    ),
    Fault(
        "an advantage of zero is opposite to another",
        "inspect/compare.py",
        "a.advantages * b.advantages < 0",
        "a.advantages * b.advantages <= 0",
        "tests/inspect/test_edges.py::test_what_rounding_leaves_of_zero_is_zero_between_two_sets",
    ),
    Fault(
        "run 0 is never what a group waits for",
        "inspect/reasons.py",
        "missing = sorted(set(range(planned)) - seen.runs)",
        "missing = sorted(set(range(1, planned)) - seen.runs)",
        "tests/inspect/test_questions.py::test_why_names_the_event_that_decided",
    ),
    Fault(
        "the warm-up ends a step early",
        "trainer/settings.py",
        "step / (self.warmup_steps + 1)",
        "step / max(1, self.warmup_steps)",
        "tests/trainer/test_learning_rate.py::test_the_rate_of_a_step_rises_falls_and_stays",
    ),
    Fault(
        "the learning rate falls below its lowest",
        "trainer/settings.py",
        "* max(falling, self.lowest_rate)",
        "* falling",
        "tests/trainer/test_learning_rate.py::test_the_rate_of_a_step_rises_falls_and_stays",
    ),
    Fault(
        "skipped steps count though others lie between them",
        "trainer/trainer.py",
        "numbers)\n            self._skipped_in_a_row = 0\n",
        "numbers)\n",
        "tests/trainer/test_non_finite.py::test_skipped_steps_with_another_between_them_are_not_in_a_row",
    ),
    Fault(
        "a replay computes with the threads of its own process",
        "trainer/trainer.py",
        "self._bits.asked(step.environment)",
        "self._bits.asked()",
        "tests/trainer/test_determinism.py::test_a_replay_restores_what_it_can_and_names_the_rest_before_its_first_step",
    ),
    Fault(
        "a packed row is predicted by the row before it",
        "trainer/token_scores.py",
        "real[limits[:-1].long()] = False",
        "real[limits[:1].long()] = False",
        "tests/trainer/test_token_scores.py::test_scores_and_gradients_are_those_of_all_logits_in_float64",
    ),
    Fault(
        "an entropy forgets what it summed when a larger logit comes",
        "trainer/token_scores.py",
        "moment = (self.moment + self.total * moved) * moved.exp()",
        "moment = self.moment * moved.exp()",
        "tests/trainer/test_token_scores.py::test_scores_and_gradients_are_those_of_all_logits_in_float64",
    ),
    Fault(
        "segments that are too damaged for an archive are not counted",
        "pipeline/history/compaction.py",
        "            self._damaged += len(facts) - len(sound)\n",
        "",
        "tests/pipeline/test_compaction.py::test_damaged_segments_stay_and_are_counted",
    ),
    Fault(
        "weights that are just as old as is allowed are refused forever",
        "pipeline/writing/planning.py",
        "return self.max_staleness is None or behind <= self.max_staleness",
        "return self.max_staleness is None or behind < self.max_staleness",
        "tests/contract/test_weights_too_old.py::test_weights_that_grow_too_old_while_they_wait_are_refused",
    ),
    Fault(
        "a receipt counts what was stored already as written",
        "pipeline/writing/write_call.py",
        "            len(written),\n            len(uids) - len(written),",
        "            len(uids),\n            0,",
        "tests/contract/test_writing.py::test_only_what_is_new_of_a_call_is_written",
    ),
    Fault(
        "a batch that was sealed meanwhile is written to as if it were open",
        "pipeline/writing/write_call.py",
        'return "late" if str(eid.batch) in self._late else self._invalid.get(eid)',
        "return self._invalid.get(eid)",
        "tests/contract/test_writing.py::test_late_experiences_are_recorded_as_rejected",
    ),
    Fault(
        "rows that leave a step are rejected nowhere",
        "pipeline/streaming/dealing.py",
        "self._lease.append(tx, [*mine, new_event(dealt)])",
        "self._lease.append(tx, [new_event(dealt)])",
        "tests/trainer/test_damaged_steps.py::test_rows_of_a_leased_step_are_dropped_and_the_rest_is_trained",
    ),
    Fault(
        "rows that left a step stay in the hands of its trainer",
        "store/projections.py",
        "if gone := rows.dropped_rows(experiment, fact):",
        "if gone := ():",
        "tests/trainer/test_damaged_steps.py::test_rows_of_a_leased_step_are_dropped_and_the_rest_is_trained",
    ),
    Fault(
        "another number of ranks is dealt the rows that an earlier one dropped",
        "pipeline/streaming/dealing.py",
        "kept, lost = sorted(found.order), dict[int, str]()",
        "kept, lost = [*range(len(found.first.groups))], dict[int, str]()",
        "tests/trainer/test_damaged_steps.py::test_ranks_come_and_go_before_and_behind_what_is_dropped",
    ),
    Fault(
        "a row that is dropped by name stays in a step that was handed out",
        "pipeline/streaming/dealing.py",
        "if unwanted or self._drops or",
        "if self._drops or",
        "tests/trainer/test_dropped_rows.py::test_a_row_that_is_dropped_leaves_its_leased_step_and_the_rest_is_trained",
    ),
    Fault(
        "what is left of a step is cut as large as the row that left it",
        "pipeline/streaming/dealing.py",
        "height * max(kept, default=0) if padded",
        "(plan.stop - plan.start) * plan.width if padded",
        "tests/trainer/test_dropped_rows.py::test_what_is_left_needs_no_more_memory_than_the_other_pieces_did",
    ),
    Fault(
        "a segment that lacks a column family is whole",
        "pipeline/loading/experiences.py",
        "return bool(blobs) and blobs.keys() >= set(families)",
        "return bool(blobs)",
        "tests/trainer/test_damaged_steps.py::test_rows_of_a_leased_step_are_dropped_and_the_rest_is_trained",
    ),
    Fault(
        "verify takes any rows for those that a step lost",
        "pipeline/verifying/trainer_audit.py",
        "if not each_once or not np.array_equal(unpacked(found.rows), all_rows):",
        "if not each_once:",
        "tests/trainer/test_damaged_steps.py::test_rows_that_leave_a_step_are_told_and_rejected",
    ),
    Fault(
        "a group that is just as old as is allowed is too old",
        "pipeline/streaming/step_sampler.py",
        "version < min_version for version",
        "version <= min_version for version",
        "tests/trainer/test_stream_choices.py::test_a_group_may_be_just_as_old_as_is_allowed",
    ),
    Fault(
        "a last, smaller step is taken while more may come",
        "pipeline/streaming/step_sampler.py",
        "not (partial_ok and min(here[driving], wanted[driving]))",
        "not min(here[driving], wanted[driving])",
        "tests/pipeline/test_waits.py"
        "::test_a_trainer_takes_a_smaller_step_only_when_nothing_more_can_come",
    ),
    Fault(
        "a commit waits only until every rank has done its first step",
        "pipeline/streaming/ranks.py",
        "self._parts.get(rank, 0) < steps[-1]",
        "self._parts.get(rank, 0) < steps[0]",
        "tests/trainer/test_ranks.py::test_a_commit_of_several_steps_waits_for_the_last_of_each_rank",
    ),
    Fault(
        "the newest policy that generated something is the one that did so last",
        "store/counters.py",
        "(counter.c.state == HIGHEST_VERSION, case((more > number, more), else_=number)),",
        "(counter.c.state == HIGHEST_VERSION, more),",
        "tests/store/test_counters.py::test_versions_go_both_ways_and_none_is_no_version",
    ),
    Fault(
        "a rollout that comes after the seal is not among those that are stored",
        "store/projections.py",
        "count_late(tx, experiment, late, ",
        "count_late(tx, experiment, late[:0], ",
        "tests/store/test_counters.py"
        "::test_rollouts_that_come_after_the_seal_are_stored_all_the_same",
    ),
    Fault(
        "rows that a step lost count as handed out",
        "store/projections.py",
        "sum(not source for _, _, source, _, _ in gone)",
        "0",
        "tests/store/test_counters.py::test_rows_that_a_step_loses_are_handed_out_no_more",
    ),
    Fault(
        "verify takes any counters for the right ones",
        "store/auditing/comparison.py",
        "_CHANGING = (configuration, batch, consumer, step, counter, assigned_reward, archived)",
        "_CHANGING = (configuration, batch, consumer, step, assigned_reward, archived)",
        "tests/pipeline/test_verify.py::test_a_changed_row_is_named",
    ),
    Fault(
        "verify takes any deliveries for the right ones",
        "store/auditing/comparison.py",
        "        yield query.rows(tx, **of, **named, addresses=wanted), rows\n",
        "        yield rows, rows\n",
        "tests/pipeline/test_verify.py::test_a_changed_row_is_named",
    ),
    Fault(
        "verify forgets manifests that are dealt anew later",
        "pipeline/verifying/verify.py",
        "self._audit.recall(readable_events(leased))",
        "self._audit.recall([])",
        "tests/trainer/test_damaged_steps.py"
        "::test_ranks_come_and_go_before_and_behind_what_is_dropped",
    ),
    Fault(
        "a batch counts as stored when it was planned",
        "pipeline/verifying/planned_runs.py",
        "        if self._stored(batch) == len(self._planned.get(batch, ())) > 0:\n",
        "        if len(self._planned.get(batch, ())) > 0:\n",
        "tests/pipeline/test_planned_runs.py::test_they_are_counted_as_sets_would",
    ),
    Fault(
        "what is written beside the training is what the training changes",
        "trainer/host_copies.py",
        "here.clone() if self.copied and is_same else here",
        "here",
        "tests/trainer/test_async_checkpoints.py"
        "::test_the_next_step_is_trained_while_the_disk_is_slow",
    ),
    Fault(
        "what could not be written beside the training is passed over",
        "trainer/commits.py",
        "            last.result()\n",
        "            last.exception()\n",
        "tests/trainer/test_async_checkpoints.py"
        "::test_what_cannot_be_written_ends_the_training_and_is_not_committed",
    ),
    Fault(
        "a trainer that was rewound was always as far as it is now",
        "store/asking/earlier.py",
        '    ("StepDealt", "TrainerRewound"),',
        '    ("StepDealt",),',
        "tests/store/test_earlier.py::test_each_position_of_a_run_that_takes_much_of_it_back",
    ),
    Fault(
        "what was decided after a position does not wait there",
        "store/asking/earlier.py",
        "a.address >= {end} AND a.experience <",
        "a.address < {end} AND a.experience <",
        "tests/store/test_earlier.py::test_each_position_of_strategies_that_came_later",
    ),
    Fault(
        "how far a strategy was is looked for in one page",
        "pipeline/history/earlier.py",
        "        before = page[-1].position\n",
        "        before = 0\n",
        "tests/store/test_earlier.py::test_each_position_of_a_run",
    ),
    Fault(
        "what is taken back while an earlier position is open shows through",
        "pipeline/history/earlier.py",
        "if refolded != self._refolded:",
        "if not self._refolded:",
        "tests/store/test_earlier.py::test_what_is_taken_back_meanwhile_is_there",
    ),
    Fault(
        "a write begins before its turn",
        "store/sqlite_seats.py",
        "        self._turns.take()\n",
        "        self._turns.give_back()\n",
        "tests/store/test_turns.py::test_a_write_waits_for_its_turn_and_gives_it_back",
    ),
    Fault(
        "who waits behind a writer that is killed begins too early",
        "store/turns.py",
        "                got = before == _JOINING\n                if not got:\n",
        "                got = True\n                if before != _JOINING:\n",
        "tests/store/test_turns.py::test_who_is_killed_in_the_line_calls_nobody_too_early",
    ),
]


def table() -> str:
    """Return the faults as a table of Markdown."""
    lines = ["| fault | in | turns red |", "|---|---|---|"]
    for fault in FAULTS:
        name = fault.test.rpartition("::")[2]
        lines.append(f"| {fault.what} | `{fault.file}` | `{name}` |")
    return "\n".join(lines) + "\n"
