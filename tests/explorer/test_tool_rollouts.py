"""Rollouts with tools: calls are read, answered, and the tokens stay those that were sampled."""

from __future__ import annotations

import json
import re
from itertools import chain
from pathlib import Path
from typing import Any

import anyio
import pytest

import trinity_buffer as tb
from tests.explorer.chat_templates import (
    FORMS,
    MISTRAL,
    QWEN,
    Form,
    Scripted,
    letter_by_letter,
    tokenizer_of,
)
from tests.explorer.vllm_dialect import VLLM, served
from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.explorer.conversation import rendered, tool_calls_in, warn_once
from trinity_buffer.explorer.local_model import LocalModel
from trinity_buffer.explorer.server import OpenAIModel

PAGE = Path(__file__).parents[2] / "docs" / "own_rollout.md"
QUESTION = {"role": "user", "content": "2 + 3 + 4?"}
NUMBERS = {"a": {"type": "integer"}, "b": {"type": "integer"}}
ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": NUMBERS}},
}


def turns_of(form: Form, tokenizer: Any) -> list[list[int]]:
    """Return the tokens of three turns, each with its end."""
    end = form.ends[0]
    turns = []
    for text in (*form.calls, form.answer):
        is_ended = text.endswith(tuple(form.ends))
        turns.append(letter_by_letter(tokenizer, text if is_ended else text + end))
    return turns


def scripted(form: Form, turns: list[list[int]] | None = None) -> LocalModel:
    """Return a model that calls `add` twice and then says the sum, letter by letter."""
    tokenizer = tokenizer_of(form)
    ends = tokenizer.convert_tokens_to_ids(list(form.ends))
    turns = turns_of(form, tokenizer) if turns is None else turns
    return LocalModel(Scripted(tokenizer, turns, ends), tokenizer, temperature=0)


async def calculated(model: Any) -> tb.Conversation:
    """Return a conversation in which all that the model asks for is added."""
    talk = tb.Conversation([QUESTION], tools=[ADD])
    while talk.said(await model.chat(talk.messages, tools=talk.tools)).tool_calls:
        for call in talk.turns[-1].tool_calls:
            numbers = json.loads(call["function"]["arguments"])
            answer = str(numbers["a"] + numbers["b"])
            talk.heard({"role": "tool", "tool_call_id": call["id"], "content": answer})
    return talk


def require_as_sampled(talk: tb.Conversation, form: Form, model: LocalModel) -> None:
    """Check that three turns became one row of the tokens that were sampled."""
    turns = turns_of(form, model.tokenizer)
    assert [list(turn.token_ids) for turn in talk.turns] == turns
    (row,) = talk.experiences(1.0)
    assert row.action_mask is not None
    assert row.tokens[row.prompt_length :][row.action_mask].tolist() == list(chain(*turns))
    assert [message["role"] for message in row.messages or ()] == [
        *("user", "assistant", "tool", "assistant", "tool", "assistant")
    ]


@pytest.mark.parametrize("name", FORMS)
async def test_three_turns_with_a_tool_are_one_row_of_what_was_sampled(name: str) -> None:
    form = FORMS[name]
    model = scripted(form)
    talk = await calculated(model)
    require_as_sampled(talk, form, model)
    calls = [turn.tool_calls[0]["function"] for turn in talk.turns[:2]]
    assert [(call["name"], json.loads(call["arguments"])) for call in calls] == [
        ("add", {"a": 2, "b": 3}),
        ("add", {"a": 5, "b": 4}),
    ]
    texts = ["", "" if name in ("llama", "mistral") else "now more"]
    assert [turn.text for turn in talk.turns[:2]] == texts
    assert "now 9" in talk.turns[2].text
    assert [turn.finish_reason for turn in talk.turns] == ["tool_calls", "tool_calls", "stop"]


async def test_texts_and_arguments_are_as_they_were_said_whatever_a_tokenizer_takes_out() -> None:
    """Older versions of transformers take blanks before punctuation out, as Llama 3 has it."""
    said = '<tool_call>\n{"name": "run", "arguments": {"code": "f(1 , 2) .x"}}\n</tool_call>'
    texts = [said + "<|im_end|>", "it is [1 , 2] . do n't<|im_end|>"]
    turns = [letter_by_letter(tokenizer_of(QWEN), text) for text in texts]
    asked = ("", "_for_bpe_even_though_it_will_corrupt_output")
    cleaning = dict.fromkeys((f"clean_up_tokenization_spaces{one}" for one in asked), True)
    tokenizer = tokenizer_of(QWEN, **cleaning)
    assert tokenizer.decode(turns[1]) != texts[1]
    ends = tokenizer.convert_tokens_to_ids(list(QWEN.ends))
    model = LocalModel(Scripted(tokenizer, turns, ends), tokenizer, temperature=0)
    (call,) = (await model.chat([QUESTION], tools=[ADD])).tool_calls
    assert json.loads(call["function"]["arguments"]) == {"code": "f(1 , 2) .x"}
    assert (await model.chat([QUESTION])).text == texts[1].removesuffix("<|im_end|>")


@pytest.mark.parametrize("name", FORMS)
async def test_a_prompt_is_what_was_sampled_and_what_the_template_writes_behind_it(
    name: str,
) -> None:
    form = FORMS[name]
    model = scripted(form)
    talk = await calculated(model)
    first, second, _ = talk.turns
    seen = [*first.prompt_ids, *first.token_ids]
    assert second.prompt_ids == [*seen, *model.tokenizer.encode(form.behind)]
    assert second.prompt_ids != model.tokenizer.encode(second.prompt_text)
    assert model.model.seen == [turn.prompt_ids for turn in talk.turns]


@pytest.mark.parametrize("name", FORMS)
def test_arguments_as_a_text_are_written_like_an_object(name: str) -> None:
    tokenizer, given = tokenizer_of(FORMS[name]), {"a": 2, "b": 3}

    def said(arguments: Any) -> str:
        function = {"name": "add", "arguments": arguments}
        call = {"id": "123456789", "type": "function", "function": function}
        asks = {"role": "assistant", "content": "", "tool_calls": [call]}
        told = {"role": "tool", "tool_call_id": "123456789", "content": "5"}
        return rendered(tokenizer, [QUESTION, asks, told], [ADD])

    assert said(json.dumps(given)) == said(given)
    with pytest.raises(InvalidArgumentError, match="arguments of the tool call 'add' are no JSON"):
        said("a=2")


async def test_a_template_that_takes_arguments_as_texts_is_given_texts() -> None:
    template = QWEN.template.replace("c.function.arguments | tojson", "'' + c.function.arguments")
    form = QWEN._replace(template=template)
    model = scripted(form)
    require_as_sampled(await calculated(model), form, model)


@pytest.mark.parametrize("name", FORMS)
async def test_sglang_is_talked_to_in_the_same_way(name: str, tiny: Path) -> None:
    form, server = FORMS[name], VLLM(tiny)
    server.model = model = scripted(form)
    with served(server.app()) as url:
        sampling = {"dialect": "sglang", "tokenizer": model.tokenizer}
        async with OpenAIModel(f"{url}/v1", **sampling) as asked:
            require_as_sampled(await calculated(asked), form, model)


async def test_who_talks_at_the_same_time_keeps_the_tokens_apart(tiny: Path) -> None:
    model, split = LocalModel(tiny), []

    async def run() -> None:
        talk = tb.Conversation([{"role": "user", "content": "guess"}])
        for _ in range(3):
            talk.said(await model.chat(talk.messages, max_tokens=2))
            talk.heard({"role": "user", "content": "higher"})
        split.append(len(talk.experiences(1.0)) - 1)

    async with anyio.create_task_group() as group:
        for _ in range(40):
            group.start_soon(run)
    assert split == [0] * 40


async def test_a_turn_that_was_cut_off_is_ended_as_the_template_does() -> None:
    tokenizer = tokenizer_of(QWEN)
    turns = [letter_by_letter(tokenizer, "now now"), letter_by_letter(tokenizer, "9<|im_end|>")]
    model = scripted(QWEN, turns)
    talk = tb.Conversation([QUESTION])
    talk.said(await model.chat(talk.messages, max_tokens=len(turns[0])))
    talk.heard({"role": "user", "content": "and?"})
    talk.said(await model.chat(talk.messages))
    (row,) = talk.experiences(1.0)
    assert talk.turns[0].finish_reason == "length"
    assert tokenizer.decode(row.tokens) == (
        "<|im_start|>user\n2 + 3 + 4?<|im_end|>\n<|im_start|>assistant\nnow now<|im_end|>\n"
        "<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n9<|im_end|>"
    )


THINKING = QWEN._replace(
    template=QWEN.template.replace(
        "{{ m.content }}{% for c",
        "{% set is_asked = messages[-1].role == 'user' %}"
        "{{ m.content.split('</think>')[-1] if is_asked else m.content }}{% for c",
    )
)


@pytest.mark.parametrize(("form", "rows"), [(QWEN, 1), (THINKING, 2)])
async def test_a_template_that_drops_thoughts_begins_another_row(form: Form, rows: int) -> None:
    tokenizer = tokenizer_of(form)
    texts = ("<think>\nadd\n</think>\n\nnow 9<|im_end|>", "now 9<|im_end|>")
    model = scripted(form, [letter_by_letter(tokenizer, text) for text in texts])
    talk = tb.Conversation([QUESTION])
    talk.said(await model.chat(talk.messages))
    talk.heard({"role": "user", "content": "sure?"})
    talk.said(await model.chat(talk.messages))
    assert len(talk.experiences(1.0)) == rows
    is_dropped = "</think>" not in tokenizer.decode(talk.turns[1].prompt_ids)
    assert is_dropped == (rows == 2)


async def test_what_was_changed_since_is_tokenised_as_it_is_now() -> None:
    for changed in ("question", "answer", "tools"):
        model = scripted(QWEN)
        talk = tb.Conversation([QUESTION], tools=[ADD])
        talk.said(await model.chat(talk.messages, tools=talk.tools))
        call = talk.turns[0].tool_calls[0]
        talk.heard({"role": "tool", "tool_call_id": call["id"], "content": "5"})
        if changed == "question":
            talk.messages[0]["content"] = "another"
        elif changed == "answer":
            talk.messages[1]["content"] = "another"
        else:
            talk.tools.append({"type": "function", "function": {"name": "another"}})
        said = await model.chat(talk.messages, tools=talk.tools)
        assert said.prompt_text is not None
        assert "another" in said.prompt_text
        assert model.tokenizer.decode(said.prompt_ids) == said.prompt_text
        assert said.prompt_ids == model.tokenizer.encode(said.prompt_text)


@pytest.mark.parametrize(
    "text",
    [
        "no call at all",
        "<tool_call>\n{'name': 'add'}\n</tool_call>",
        '<tool_call>\n{"name": "add", "arguments": {"a": 2',
        '<tool_call>{"name": "add", "arguments": [1, 2]}</tool_call>',
        '<tool_call>{"name": 7, "arguments": {}}</tool_call>',
        "<tool_call><function=add>a=2</function></tool_call>",
        "<function=add><parameter=a>2",
        '{"name": "other", "parameters": {"a": 2}}',
        '{"name": "add", "parameters": {"a": 2}} is what I would call',
        '{"sum": 5}',
        "<|python_tag|>add.call(a=2)",
        "[TOOL_CALLS]add",
        '[TOOL_CALLS][{"name": "add", "arguments": {"a": 2}}, 7]',
        "<|channel|>commentary to=functions.add<|message|>a=2<|call|>",
        "<|channel|>commentary to=python<|message|>2 + 3<|call|>",
        "<|channel|>final<|message|>5<|return|>",
        "[" * 100_000,
    ],
)
def test_what_is_no_call_stays_text(text: str) -> None:
    assert tool_calls_in(text, [ADD]) == (text, [])


@pytest.mark.parametrize(
    "text",
    [
        "[TOOL_CALLS]add" + " " * 300_000,
        "<|channel|>" + "a" * 300_000,
        "<tool_call>" + " " * 300_000,
        "<function=" * 3_000,
        '<|python_tag|>{"name":' * 3_000,
        "{" * 300_000,
    ],
)
def test_a_long_text_that_is_no_call_is_read_to_its_end(text: str) -> None:
    assert tool_calls_in(text, [ADD]) == (text, [])  # were it quadratic: after minutes


@pytest.mark.parametrize(
    ("text", "rest", "arguments"),
    [
        (
            'one <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call> two '
            '<tool_call>{"name": "add", "arguments": "{\\"a\\": 2}"}</tool_call>'
            "<tool_call>broken</tool_call>",
            "one  two <tool_call>broken</tool_call>",
            [{"a": 1}, {"a": 2}],
        ),
        (
            '<tool_call>{"name": "add", "arguments": {"a": "</tool_call>\n"}}',
            "",
            [{"a": "</tool_call>\n"}],
        ),
        (
            '{"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {"a": 2}}',
            "",
            [{"a": 1}, {"a": 2}],
        ),
        ('see <|python_tag|>{"name": "new", "parameters": {}} x', "see  x", [{}]),
        ('[TOOL_CALLS]add{"a": 1}[TOOL_CALLS]add{"a": 2}', "", [{"a": 1}, {"a": 2}]),
        (
            '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}, '
            '{"name": "add", "arguments": {"a": 2}}]',
            "",
            [{"a": 1}, {"a": 2}],
        ),
        (
            "<function=add>\n<parameter=a>\n1\n2\n</parameter>\n<parameter=s>\n7\n</parameter>\n"
            "<parameter=b>\nTrue\n</parameter>\n</function>",
            "",
            [{"a": "1\n2", "s": "7", "b": True}],
        ),
    ],
)
def test_calls_are_taken_out_of_the_text(text: str, rest: str, arguments: list[Any]) -> None:
    left, calls = tool_calls_in(text, [ADD])
    assert left == rest
    assert [json.loads(call["function"]["arguments"]) for call in calls] == arguments
    assert len({call["id"] for call in calls}) == len(calls)
    assert all(re.fullmatch(r"[0-9a-z]{9}", call["id"]) for call in calls)


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, 3),  # Optional[int] of pydantic
        ({"oneOf": [{"type": ["number", "null"]}]}, 3),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "3"),
        ({"type": ["string", "null"]}, "3"),
        (True, "3"),
        ({}, "3"),
    ],
)
def test_an_argument_that_is_written_as_text_has_a_type_of_its_schema(
    schema: Any, value: Any
) -> None:
    function = {"name": "f", "parameters": {"properties": {"a": schema}}}
    said = "<function=f>\n<parameter=a>\n3\n</parameter>\n</function>"
    _, (call,) = tool_calls_in(said, [{"type": "function", "function": function}])
    assert json.loads(call["function"]["arguments"]) == {"a": value}


async def test_messages_that_know_their_tokens_are_stored_as_they_are(store_url: str) -> None:
    talk = await calculated(scripted(QWEN))
    row = tb.Experience(
        eid=tb.EID("b", 0), tokens=[1, 2], prompt_length=1, messages=talk.messages, tools=talk.tools
    )
    async with tb.open_store(store_url) as store:
        experiment = await store.experiment("run", config={"schema": "sft"})
        await experiment.writer("e").write([row])
        (stored,) = [one async for one in experiment.read()]
    assert stored.messages == talk.messages == json.loads(json.dumps(talk.messages))
    assert {type(message) for message in stored.messages or ()} == {dict}


@pytest.mark.parametrize(("writes_tools", "warnings"), [(True, 0), (False, 1)])
async def test_a_template_that_writes_no_tools_is_warned_of_once(
    writes_tools: bool, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    warn_once.cache_clear()
    form = QWEN if writes_tools else QWEN._replace(template=QWEN.template.partition("endif %}")[2])
    await calculated(scripted(form))
    assert caplog.text.count("the chat template writes no tools") == warnings


async def test_without_tools_nothing_is_read_as_a_call() -> None:
    model = scripted(QWEN)
    said = await model.chat([QUESTION])
    assert (said.tool_calls, said.finish_reason) == ((), "stop")
    assert said.text == QWEN.calls[0]


async def test_a_template_that_refuses_a_conversation_says_why() -> None:
    model = scripted(MISTRAL)
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    asks = {"role": "assistant", "content": "", "tool_calls": [call]}
    told = {"role": "tool", "tool_call_id": "c1", "content": "5"}
    with pytest.raises(InvalidArgumentError, match=r"cannot write .*Tool call IDs have 9 letters"):
        await model.chat([QUESTION, asks, told], tools=[ADD])


@pytest.mark.parametrize("name", FORMS)
async def test_the_rollout_of_the_page_runs_with_every_form(name: str) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (block,) = (block for block in blocks if "async def calculate" in block)
    names: dict[str, Any] = {"tb": tb}
    exec(block, names)
    form = FORMS[name]
    (row,) = await names["calculate"]({"question": "2 + 3 + 4?", "answer": "9"}, scripted(form))
    assert row.reward == 1.0
    assert row.tools == names["TOOLS"]
    assert row.action_mask.sum() == sum(map(len, turns_of(form, tokenizer_of(form))))
