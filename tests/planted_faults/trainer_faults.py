"""Faults of what trains; see `faults`."""

from __future__ import annotations

from tests.planted_faults.fault import Fault

TRAINER_FAULTS = [
    Fault(
        "the oldest checkpoint to keep is removed",
        "trainer/checkpoint.py",
        "gone = newest and (step < newest[0] or",
        "gone = newest and (step <= newest[0] or",
        "tests/trainer/test_checkpoint_folder.py::test_the_newest_steps_stay_and_what_was_begun_before_the_commit_goes",
    ),
    Fault(
        "the warm-up ends a step early",
        "trainer/trainer.py",
        "step / (self.warmup_steps + 1)",
        "step / max(1, self.warmup_steps)",
        "tests/trainer/test_learning_rate.py::test_the_rate_of_a_step_rises_falls_and_stays",
    ),
    Fault(
        "the learning rate falls below its lowest",
        "trainer/trainer.py",
        "* max(falling, self.min_lr_ratio)",
        "* falling",
        "tests/trainer/test_learning_rate.py::test_the_rate_of_a_step_rises_falls_and_stays",
    ),
    Fault(
        "skipped steps count though others lie between them",
        "trainer/trainer.py",
        "rows_of_step)\n            self._skipped_in_a_row = 0\n",
        "rows_of_step)\n",
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
        "moment = (sums.moment + sums.total * moved) * moved.exp()",
        "moment = sums.moment * moved.exp()",
        "tests/trainer/test_token_scores.py::test_scores_and_gradients_are_those_of_all_logits_in_float64",
    ),
    Fault(
        "so does the kernel for GPUs",
        "trainer/head_kernels.py",
        "moment = (moment + total * moved) * tl.exp(moved)",
        "moment = moment * tl.exp(moved)",
        "tests/trainer/test_head_kernels.py::test_interpreted_kernels_say_what_torch_says",
    ),
    Fault(
        "what is written beside the training is what the training changes",
        "trainer/parallel.py",
        "here.clone() if self.copied and is_same else here",
        "here",
        "tests/trainer/test_async_checkpoints.py"
        "::test_the_next_step_is_trained_while_the_disk_is_slow",
    ),
    Fault(
        "what could not be written beside the training is passed over",
        "trainer/checkpoint.py",
        "            last.result()\n",
        "            last.exception()\n",
        "tests/trainer/test_async_checkpoints.py"
        "::test_what_cannot_be_written_ends_the_training_and_is_not_committed",
    ),
    Fault(
        "weights change while a GPU copies them",
        "trainer/checkpoint.py",
        "            copies.hold()\n",
        "            pass\n",
        "tests/trainer/test_host_copies.py"
        "::test_what_is_computed_after_a_commit_waits_for_the_copies",
    ),
    Fault(
        "the state of an optimizer changes while a GPU copies it",
        "trainer/trainer.py",
        "        self._commits.hold()\n",
        "",
        "tests/trainer/test_host_copies.py"
        "::test_what_is_computed_after_a_commit_waits_for_the_copies",
    ),
    Fault(
        "weights are copied before a GPU has computed them",
        "trainer/parallel.py",
        "            stream.wait_stream(self._gpu.current_stream(device))\n",
        "",
        "tests/trainer/test_host_copies.py::test_what_is_being_computed_is_copied_when_it_is_done",
    ),
    Fault(
        "a digest of before is compared with one of now",
        "pipeline/train/checkpoint.py",
        "contents_of(new, version)",
        "contents_of(new)",
        "tests/pipeline/test_digest_versions.py"
        "::test_a_recorded_digest_of_either_version_is_accepted_and_other_content_refused",
    ),
    Fault(
        "what comes behind the last whole piece of a file is not hashed",
        "pipeline/train/checkpoint.py",
        "begins = range(0, size, PIECE_BYTES)",
        "begins = range(0, size + 1 - PIECE_BYTES, PIECE_BYTES)",
        "tests/pipeline/test_digest_versions.py"
        "::test_a_larger_file_is_hashed_in_pieces_which_its_digest_says",
    ),
]
