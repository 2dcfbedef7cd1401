"""Settings of torch while the trainer computes: applied, put back, recorded, and compared."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import anyio
import pytest
import torch
from typing_extensions import override

import trinity_buffer as tb
from tests.trainer.data import CONFIG, policy, prepared
from tests.trainer.gradients import train
from tests.trainer.qwen import qwen2
from trinity_buffer.algorithm import build
from trinity_buffer.demo.policy import TransformerPolicy
from trinity_buffer.errors import TrainingError
from trinity_buffer.events import StepsCommitted
from trinity_buffer.pipeline.train.step import CUBLAS_WORKSPACE, differences, environment_of_run
from trinity_buffer.trainer import determinism
from trinity_buffer.trainer.determinism import (
    FLASH_ATTENTION,
    SameBits,
    algorithm_settings,
    attention_of,
    same_bits,
)
from trinity_buffer.trainer.parallel import Processes
from trinity_buffer.trainer.policy import TokenScores


def settings() -> dict[str, Any]:
    """Return all that `same_bits` may change."""
    inductor = __import__("torch._inductor.config", fromlist=["config"])
    return {
        "mode": torch.get_deterministic_debug_mode(),
        "fill": torch._C._get_deterministic_fill_uninitialized_memory(),
        "cudnn": (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark),
        "inductor": inductor.deterministic,
        "flash": os.environ.get(FLASH_ATTENTION),
        "threads": torch.get_num_threads(),
        "precision": torch.get_float32_matmul_precision(),
    }


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before = settings()
    yield
    assert settings() == before


class Watching(TransformerPolicy):
    """Notes in which settings it is scored, and what was said before."""

    def __init__(self, messages: Callable[[], list[str]] = list) -> None:
        super().__init__(CONFIG)
        self.seen: list[dict[str, Any]] = []
        self.said_before: list[list[str]] = []
        self._messages = messages

    @override
    def scores(self, microbatch: Mapping[str, Any]) -> TokenScores:
        self.seen.append(settings())
        self.said_before.append(self._messages())
        return super().scores(microbatch)


def trained(url: str, folder: Path, model: Any, steps: int = 2, **options: Any) -> tb.Trainer:
    """Train with one group a step."""
    with tb.open_train_stream(url, experiment="run", strategy="grpo", groups_per_step=1) as stream:
        made = tb.TrainerSettings(checkpoints=folder, max_steps=steps, **options)
        trainer = tb.Trainer(stream, model, build("grpo"), made)
        trainer.run()
    return trainer


def environments(url: str) -> list[Mapping[str, Any]]:
    """Return what the commits of a run say."""

    async def read() -> list[Mapping[str, Any]]:
        async with tb.open_store(url) as store:
            experiment = await store.experiment("run")
            return [
                event.fact.environment
                async for event in experiment.events()
                if isinstance(event.fact, StepsCommitted)
            ]

    return anyio.run(read)


@pytest.fixture
def url(sqlite_url: str) -> str:
    anyio.run(prepared, sqlite_url, build("grpo"))
    return sqlite_url


def test_the_trainer_asks_for_deterministic_algorithms_and_puts_back_what_was(
    url: str, tmp_path: Path
) -> None:
    before = settings()
    model = Watching()
    trained(url, tmp_path, model)
    assert settings() == before
    assert {one["mode"] for one in model.seen} == {2}  # an error, not a warning
    assert {one["fill"] for one in model.seen} == {False}


def test_the_own_code_between_steps_runs_in_the_settings_of_its_owner(
    url: str, tmp_path: Path
) -> None:
    modes = []

    def note(_: object) -> bool:
        modes.append(torch.get_deterministic_debug_mode())
        return False

    with tb.open_train_stream(url, experiment="run", strategy="grpo", groups_per_step=1) as stream:
        trainer = tb.Trainer(
            stream, policy(), build("grpo"), tb.TrainerSettings(checkpoints=tmp_path, max_steps=2)
        )
        trainer.run(note, measure=lambda step: {"noted": float(note(step))})
    assert modes == [0, 0, 0, 0]


def test_without_it_torch_stays_as_it_is(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CUBLAS_WORKSPACE, "")  # so that it is put back
    monkeypatch.delenv(CUBLAS_WORKSPACE)
    before, model = settings(), Watching()
    trained(url, tmp_path, model, deterministic=False)
    assert all(one == before for one in model.seen)
    # With a torch for GPUs it is set for a later trainer, which could not set it any more.
    assert (CUBLAS_WORKSPACE in os.environ) == (torch.version.cuda is not None)
    assert [one["deterministic"] for one in environments(url)] == [False, False]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_all_is_put_back_after_an_error_and_after_an_interruption(
    error: type[BaseException],
) -> None:
    before = settings()
    within: dict[str, Any] = {}
    recorded = {"deterministic": True, "threads": before["threads"] + 1}
    asked = same_bits("cpu", deterministic=True, recorded=recorded | {"matmul_precision": "medium"})

    def failing() -> None:
        with asked:
            within.update(settings())
            raise error

    with pytest.raises(error):
        failing()
    assert within["mode"] == 2
    assert (within["threads"], within["precision"]) == (before["threads"] + 1, "medium")
    assert settings() == before


def test_a_user_who_asked_for_warnings_gets_them_back() -> None:
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    try:
        with same_bits("cpu", deterministic=True):
            assert torch.get_deterministic_debug_mode() == 2
        assert torch.get_deterministic_debug_mode() == 1
        assert environment_of_run("cpu")["only_warns"] is True
    finally:
        torch.use_deterministic_algorithms(mode=False)


def test_trainers_in_two_threads_keep_what_either_asked_for() -> None:
    before, first = settings(), same_bits("cpu", deterministic=True)
    first.__enter__()
    with same_bits("cpu", deterministic=True):
        first.__exit__(None, None, None)
        assert torch.get_deterministic_debug_mode() == 2
        assert os.environ[FLASH_ATTENTION] == "1"
    assert settings() == before


def test_an_interruption_while_it_is_asked_for_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    before = settings()
    monkeypatch.setattr(determinism, "_set", interrupted)
    with pytest.raises(KeyboardInterrupt), same_bits("cpu", deterministic=True):
        pass
    assert settings() == before
    monkeypatch.undo()
    with same_bits("cpu", deterministic=True):
        assert torch.get_deterministic_debug_mode() == 2
    assert settings() == before


class Unordered(TransformerPolicy):
    """Uses an operation that torch has no deterministic form of, on a CPU either."""

    @override
    def scores(self, microbatch: Mapping[str, Any]) -> TokenScores:
        scores = super().scores(microbatch)
        first = torch.zeros(1, dtype=torch.long)
        return scores._replace(entropy=scores.entropy.put(first, scores.entropy.flatten()[:1]))


def test_an_operation_without_a_deterministic_form_is_named_with_the_setting(
    url: str, tmp_path: Path
) -> None:
    with pytest.raises(TrainingError) as raised:
        trained(url, tmp_path / "a", Unordered(CONFIG))
    assert "no deterministic form of put_" in str(raised.value)
    assert "set deterministic=False (of TrainerSettings" in str(raised.value)
    assert "only within a tolerance" in str(raised.value)
    assert any("in step 1, in the micro-batch" in note for note in raised.value.__notes__)
    assert trained(url, tmp_path / "b", Unordered(CONFIG), deterministic=False).state.step == 2


def test_on_a_gpu_all_is_asked_for_and_put_back_but_the_workspace_of_cublas(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(CUBLAS_WORKSPACE, raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    before = settings()
    with same_bits("cpu", deterministic=True):
        within = settings()
    assert settings() == before
    assert within == before | {
        "mode": 2,
        "fill": False,
        "cudnn": (True, False),
        "inductor": True,
        "flash": "1",
    }
    assert os.environ[CUBLAS_WORKSPACE] == ":4096:8"


def test_a_workspace_of_cublas_that_the_user_chose_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CUBLAS_WORKSPACE, ":16:8")
    monkeypatch.setenv(FLASH_ATTENTION, "0")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with same_bits("cpu", deterministic=True):
        assert os.environ[FLASH_ATTENTION] == "1"
    assert os.environ[CUBLAS_WORKSPACE] == ":16:8"
    assert os.environ[FLASH_ATTENTION] == "0"


class Copied(TransformerPolicy):
    """Notes which workspace cuBLAS has when the reference is made of it."""

    workspaces: ClassVar[list[str | None]] = []

    @override
    def scores(self, microbatch: Mapping[str, Any]) -> TokenScores:
        self.workspaces.append(os.environ.get(CUBLAS_WORKSPACE))
        return super().scores(microbatch)

    def __deepcopy__(self, memo: dict[int, Any]) -> TransformerPolicy:
        self.workspaces.append(os.environ.get(CUBLAS_WORKSPACE))
        return TransformerPolicy(CONFIG)


@pytest.mark.parametrize("deterministic", [True, False])
def test_the_workspace_of_cublas_is_chosen_before_a_trainer_uses_a_model(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, deterministic: bool
) -> None:
    monkeypatch.delenv(CUBLAS_WORKSPACE, raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(Copied, "workspaces", [])
    trained(url, tmp_path, Copied(CONFIG), steps=1, deterministic=deterministic)
    assert len(Copied.workspaces) > 1
    assert set(Copied.workspaces) == {":4096:8"}  # torch looks once, whatever it is asked for


def test_a_process_that_multiplied_on_the_gpu_too_early_is_told_which_variable_to_set() -> None:
    said = (
        "Deterministic behavior was enabled with either `torch.use_deterministic_algorithms(True)` "
        "or `at::Context::setDeterministicAlgorithms(true)`, but this operation is not "
        "deterministic because it uses CuBLAS and you have CUDA >= 10.2. To enable deterministic "
        "behavior in this case, you must set an environment variable before running your PyTorch "
        "application: CUBLAS_WORKSPACE_CONFIG=:4096:8 or CUBLAS_WORKSPACE_CONFIG=:16:8."
    )
    with (
        pytest.raises(TrainingError, match="set CUBLAS_WORKSPACE_CONFIG=:4096:8 in its environ"),
        same_bits("cpu", deterministic=True),
    ):
        raise RuntimeError(said)


def test_what_is_recorded_of_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    version = tmp_path / "version"
    version.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\nGCC\n"
    )
    monkeypatch.setattr("trinity_buffer.pipeline.train.step.DRIVER_FILE", version)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"H100 {device}")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91500)
    monkeypatch.setenv(CUBLAS_WORKSPACE, ":4096:8")
    monkeypatch.setattr("trinity_buffer.pipeline.train.step.triton_version", lambda: "3.6.0")
    recorded = environment_of_run("cuda:0")
    assert {
        name: recorded[name] for name in recorded.keys() - environment_of_run("cpu").keys()
    } == {
        "gpu": "H100 cuda:0",
        "driver": "570.86.15",
        "cuda": "13.0",
        "cudnn": 91500,
        "cudnn_benchmark": False,
        "cudnn_tf32": True,
        "matmul_bf16_reduction": True,
        "matmul_fp16_reduction": True,
        "cublas_workspace": ":4096:8",
        "triton": "3.6.0",
    }
    assert "processor" not in recorded
    version.unlink()
    assert "driver" not in environment_of_run("cuda:0")


def test_the_backends_of_attention_are_restored_and_put_back() -> None:
    every = environment_of_run("cpu")["attention_backends"]
    assert every == "cudnn+flash+mem_efficient+math"
    recorded = {"attention_backends": "flash+math"}
    with same_bits("cpu", deterministic=True, recorded=recorded):
        assert environment_of_run("cpu")["attention_backends"] == "flash+math"
        assert not torch.backends.cuda.mem_efficient_sdp_enabled()
    assert environment_of_run("cpu")["attention_backends"] == every


def test_the_precision_of_products_on_a_gpu_is_restored_and_put_back() -> None:
    flags = torch.backends.cuda.matmul, torch.backends.cudnn
    recorded = {"cudnn_tf32": False, "matmul_bf16_reduction": False, "matmul_precision": "high"}
    with same_bits("cuda", deterministic=False, recorded=recorded):
        assert (flags[0].allow_bf16_reduced_precision_reduction, flags[1].allow_tf32) == (
            False,
            False,
        )
        assert flags[0].allow_tf32
    assert flags[0].allow_bf16_reduced_precision_reduction
    assert (flags[0].allow_tf32, flags[1].allow_tf32) == (False, True)


def test_a_name_of_several_words_is_given_whole() -> None:
    with (
        pytest.raises(TrainingError, match="no deterministic form of median CUDA with indices out"),
        same_bits("cpu", deterministic=True),
    ):
        raise RuntimeError(
            "step:\nmedian CUDA with indices output does not have a deterministic implementation, "
            "but you set 'torch.use_deterministic_algorithms(True)'"
        )


def test_an_error_of_another_kind_passes_as_it_is() -> None:
    with (
        pytest.raises(RuntimeError, match=r"^of another kind$"),
        same_bits("cpu", deterministic=True),
    ):
        raise RuntimeError("of another kind")


@pytest.mark.parametrize("name", ["grpo", "ppo", "dpo", "sft", "on_policy_distill"])
def test_on_a_processor_the_bits_are_those_without_it(
    name: str, sqlite_url: str, tmp_path: Path
) -> None:
    algorithm = build(name)
    anyio.run(prepared, sqlite_url, algorithm)
    weights = []
    for asked in (True, False):
        name = f"trainer-{asked}"
        trainer, _ = train(
            sqlite_url, algorithm, tmp_path / name, max_steps=2, consumer=name, deterministic=asked
        )
        weights.append(trainer.policy.state_dict())
    for key, weight in weights[0].items():
        assert torch.equal(weight, weights[1][key]), key


def test_a_commit_records_what_the_trainer_had(url: str, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    trained(url, tmp_path, policy(), steps=2, async_checkpoints=True)
    one, other = environments(url)
    assert one == other
    assert one == environment_of_run("cpu") | {
        "deterministic": True,
        "seed": 0,
        "ranks": 1,
        "threads": threads,
        **tb.TrainerSettings(checkpoints=tmp_path).deciding(is_own=False),
        **algorithm_settings(build("grpo")),
    }
    assert one["processor"] == torch.backends.cpu.get_cpu_capability()
    assert one["matmul_precision"] == "highest"


def test_a_loop_of_ones_own_records_what_torch_says_in_its_thread(url: str) -> None:
    threads = torch.get_num_threads()
    with tb.open_train_stream(url, experiment="run", strategy="grpo", groups_per_step=1) as stream:
        torch.use_deterministic_algorithms(mode=True)
        torch.set_num_threads(threads + 2)
        try:
            stream.commit(next(stream))
        finally:
            torch.use_deterministic_algorithms(mode=False)
            torch.set_num_threads(threads)
    (recorded,) = environments(url)
    assert (recorded["deterministic"], recorded["threads"]) == (True, threads + 2)


def test_the_attention_of_a_model_of_transformers_is_recorded() -> None:
    assert attention_of(qwen2()) == qwen2().config._attn_implementation
    assert attention_of(policy()) is None
    assert environment_of_run("cpu")["transformers"]  # it is imported here


def test_a_run_that_goes_on_elsewhere_says_what_differs_once(
    url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    threads = torch.get_num_threads()
    trained(url, tmp_path, policy(), steps=1)
    assert caplog.messages == []
    torch.set_num_threads(threads + 1)
    try:
        trainer = trained(url, tmp_path, policy(), steps=3)
    finally:
        torch.set_num_threads(threads)
    assert trainer.differences == {"threads": [threads, threads + 1]}
    assert caplog.messages == [
        f"step 2: the commit before it was made with threads {threads} (here {threads + 1}): from "
        "here on, the bits need not be those that the run would have had there"
    ]


def test_a_replay_restores_what_it_can_and_names_the_rest_before_its_first_step(
    url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = torch.get_num_threads()
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(torch, "__version__", "2.0")
        torch.set_num_threads(threads + 1)
        torch.set_float32_matmul_precision("high")
        try:
            then = trained(url, tmp_path / "a", policy())
        finally:
            torch.set_num_threads(threads)
            torch.set_float32_matmul_precision("highest")
    caplog.clear()
    model = Watching(lambda: [*caplog.messages])
    with tb.open_replay_stream(url, experiment="run") as stream:
        made = tb.TrainerSettings(checkpoints=tmp_path / "b")
        replay = tb.Trainer(stream, model, build("grpo"), made)
        replay.run()
    assert {(one["threads"], one["precision"]) for one in model.seen} == {(threads + 1, "high")}
    assert replay.differences == {"torch": ["2.0", torch.__version__]}
    assert caplog.messages == [
        f"step 1 was trained with torch 2.0 (here {torch.__version__}): do not expect the same "
        "bits from this replay"
    ]
    assert model.said_before[0] == caplog.messages
    for name, weight in then.policy.state_dict().items():
        assert torch.equal(weight, model.state_dict()[name]), name


@pytest.mark.parametrize("is_own", [True, False])
def test_a_replay_with_other_settings_names_them(
    url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, *, is_own: bool
) -> None:
    """The rates of an optimizer of one's own are not those of the settings."""
    other: dict[str, Any] = {"learning_rate": 0.5, "betas": (0.8, 0.9)}
    differ: dict[str, Any] = {"max_gradient_norm": [1.0, 0.1]}
    if not is_own:
        differ |= {"learning_rate": [0.001, 0.5], "betas": [[0.9, 0.999], [0.8, 0.9]]}

    def run(stream: Any, **options: Any) -> tb.Trainer:
        model = policy()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if is_own else None
        settings = tb.TrainerSettings(checkpoints=tmp_path, **options)
        trainer = tb.Trainer(stream, model, build("grpo"), settings, optimizer=optimizer)
        trainer.run()
        return trainer

    with tb.open_train_stream(url, experiment="run", strategy="grpo", groups_per_step=1) as stream:
        run(stream)
    for options, found in (({}, {}), ({"max_gradient_norm": 0.1, **other}, differ)):
        with tb.open_replay_stream(url, experiment="run") as replayed:
            assert run(replayed, **options).differences == found
    assert "step 1 was trained with" in caplog.text


def test_a_replay_with_another_algorithm_names_the_parts_that_differ(
    url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained(url, tmp_path, policy())
    caplog.clear()
    settings = tb.TrainerSettings(checkpoints=tmp_path / "replayed")

    def replayed(**parts: Any) -> Mapping[str, list[Any]]:
        with tb.open_replay_stream(url, experiment="run") as stream:
            trainer = tb.Trainer(stream, policy(), build("grpo", **parts), settings)
            trainer.run()
        return trainer.differences

    assert replayed() == {}
    differ = replayed(policy_loss_fn_args={"clip_range": 0.1}, kl_loss_fn="none")
    assert differ.keys() == {"policy_loss_fn", "kl_loss_fn"}
    assert differ["kl_loss_fn"][1] == "none"
    assert "clip_range=0.2" in differ["policy_loss_fn"][0]
    assert "step 1 was trained with policy_loss_fn ppo(" in caplog.text
    assert not any(" at 0x" in str(value) for value in environments(url)[0].values())


SGD: dict[str, Any] = {"lr": 0.1, "momentum": 0.5}


@pytest.mark.parametrize(
    ("kind", "settings", "differ"),
    [
        (torch.optim.SGD, SGD, {}),
        (torch.optim.SGD, SGD | {"lr": 0.2}, {"optimizer.lr": [0.1, 0.2]}),
        (torch.optim.SGD, SGD | {"momentum": 0.0}, {"optimizer.momentum": [0.5, 0.0]}),
        (torch.optim.RMSprop, SGD, {"optimizer": ["SGD", "RMSprop"]}),
        (None, {}, {"optimizer": ["SGD", None], "optimizer.momentum": [0.5, None]}),
    ],
)
def test_a_replay_with_another_optimizer_of_ones_own_names_what_differs(
    url: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    kind: Any,
    settings: Any,
    differ: Any,
) -> None:
    def run(stream: Any, kind: Any, settings: Any, steps: int | None = None) -> tb.Trainer:
        model = policy()
        optimizer = None if kind is None else kind(model.parameters(), **settings)
        made = tb.TrainerSettings(checkpoints=tmp_path, max_steps=steps)
        trainer = tb.Trainer(stream, model, build("grpo"), made, optimizer=optimizer)

        def fall(_: object) -> None:  # a schedule, whose rate is the checkpoint's after a restart
            if optimizer is not None:
                optimizer.param_groups[0]["lr"] *= 0.5

        trainer.run(fall)
        return trainer

    for steps in (2, 4):
        with tb.open_train_stream(
            url, experiment="run", strategy="grpo", groups_per_step=1
        ) as stream:
            assert run(stream, torch.optim.SGD, SGD, steps).differences == {}
    with tb.open_replay_stream(url, experiment="run") as replayed:
        found = run(replayed, kind, settings).differences
    assert {name: pair for name, pair in found.items() if name in differ} == differ
    assert bool(found) == bool(differ) == ("step 1 was trained with optimizer" in caplog.text)
    first = environments(url)[0]
    # As each group has them: in the order of a set, no two processes would write the same bytes.
    own = [f"optimizer.{name}" for name in torch.optim.SGD(policy().parameters()).defaults]
    assert [name for name in first if "optimizer." in name] == own
    old = {name: value for name, value in first.items() if "optimizer" not in name}
    assert differences(old, first) == {}


class SecondOfTwo(Processes):
    """The rank above 0 of two."""

    rank, world_size = 1, 2


def test_a_rank_above_0_notes_what_differs_and_leaves_it_to_rank_0_to_say_so(
    url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained(url, tmp_path, policy())
    with tb.open_replay_stream(url, experiment="run") as stream:
        settings = tb.TrainerSettings(checkpoints=tmp_path).deciding(is_own=False)
        settings |= algorithm_settings(build("grpo"))
        bits = SameBits(stream, SecondOfTwo(), deterministic=True, settings=settings)
        with bits.asked():
            bits.compare(next(stream), policy())
    assert bits.environment["ranks"] == 2
    assert bits.differences == {"ranks": [1, 2]}
    assert caplog.messages == []


def test_a_run_that_asked_for_nothing_is_replayed_so(url: str, tmp_path: Path) -> None:
    trained(url, tmp_path / "a", policy(), deterministic=False)
    model = Watching()
    with tb.open_replay_stream(url, experiment="run") as stream:
        made = tb.TrainerSettings(checkpoints=tmp_path / "b")
        replay = tb.Trainer(stream, model, build("grpo"), made)
        replay.run()
    assert {one["mode"] for one in model.seen} == {0}
    assert replay.differences == {}


def test_what_an_older_version_did_not_record_is_no_difference() -> None:
    here = environment_of_run("cpu")
    old = {name: here[name] for name in ("torch", "device", "threads", "deterministic")}
    assert differences({**old, "seed": 5}, here) == {}
    assert differences({**old, "gpu": "H100"}, here) == {"gpu": ["H100", None]}
