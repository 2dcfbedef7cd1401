"""Chat templates in the forms of common models, a tokenizer for them, and a model with a script."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import tokenizers
import torch
import transformers
from transformers.convert_slow_tokenizer import bytes_to_unicode
from typing_extensions import override

MERGES = [("a", "d"), ("ad", "d"), ('"', ":"), ("Ġ", "{"), ("n", "o"), ("no", "w"), ("<", "t")]
"""So that a text has other tokens than a model that says it letter by letter."""


class Form(NamedTuple):
    """A way in which models are taught to call tools.

    Attributes:
        template: writes a conversation.
        special: tokens that `decode` may skip.
        ends: with which the model ends a turn; the first is the tokenizer's.
        calls: what a model says to add 2 and 3 and then, with a text before it where the form has
            texts beside calls, 5 and 4.
        behind: what the template writes behind the first call, which was answered with 5.
        answer: how the model says that the sum is 9.
    """

    template: str
    special: Sequence[str]
    ends: Sequence[str]
    calls: tuple[str, str]
    behind: str
    answer: str = "now 9"


IM = "{{ '<|im_start|>' + ('user' if m.role == 'tool' else m.role) + '\n' }}"
QWEN = Form(
    "{% if tools %}<|im_start|>system\nTools:{% for t in tools %} {{ t | tojson }}{% endfor %}"
    "<|im_end|>\n{% endif %}{% for m in messages %}" + IM + "{% if m.role == 'tool' %}"
    "<tool_response>\n{{ m.content }}\n</tool_response>{% else %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '\n' if m.content or not loop.first else '' }}"
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    ("<|im_start|>",),
    ("<|im_end|>",),
    (
        '<tool_call>\n{"name":"add", "arguments":{"b":3,"a":2}}\n</tool_call>',
        'now more\n<tool_call>\n{"name": "add", "arguments": {"a": 5, "b": 4}}\n</tool_call>',
    ),
    "\n<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
)
CODER = Form(
    "{% for m in messages %}" + IM + "{% if m.role == 'tool' %}<tool_response>\n{{ m.content }}\n"
    "</tool_response>\n{% else %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "\n<tool_call>\n<function={{ c.function.name }}>\n"
    "{% for key, value in c.function.arguments.items() %}<parameter={{ key }}>\n{{ value }}\n"
    "</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    ("<|im_start|>",),
    ("<|im_end|>",),
    (
        "<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n<parameter=b>\n3\n"
        "</parameter>\n</function>\n</tool_call>",
        "now more\n\n<tool_call>\n<function=add>\n<parameter=a>5</parameter>\n"
        "<parameter=b>\n4\n</parameter>\n</function>\n</tool_call>",
    ),
    "\n<|im_start|>user\n<tool_response>\n5\n</tool_response>\n<|im_end|>\n<|im_start|>assistant\n",
)
LLAMA = Form(
    "<|begin_of_text|>{% for m in messages %}<|start_header_id|>"
    "{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>\n\n"
    "{% if m.tool_calls %}{% set c = m.tool_calls[0].function %}"
    '{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}'
    "{% else %}{{ m.content | trim }}{% endif %}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
    ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>"),
    ("<|eot_id|>", "<|eom_id|>"),
    (
        '{"name": "add", "parameters": {"a": 2, "b":3}}',
        '<|python_tag|>{"type": "function", "name": "add", "parameters": {"a": 5, "b": 4}}'
        "<|eom_id|>",
    ),
    "<|start_header_id|>ipython<|end_header_id|>\n\n5<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
)
MISTRAL = Form(
    "<s>{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}"
    "{{ raise_exception('Tool call IDs have 9 letters') }}{% endif %}"
    '[TOOL_RESULTS]{"content": {{ m.content }}, "call_id": "{{ m.tool_call_id }}"}'
    "[/TOOL_RESULTS]{% elif m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, '
    '"id": "{{ c.id }}"}{% endfor %}]</s>{% else %}{{ m.content }}</s>{% endif %}{% endfor %}',
    ("<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[ARGS]"),
    ("</s>",),
    (
        '[TOOL_CALLS][{"name": "add", "arguments": {"a": 2, "b": 3}, "id": "fromModel"}]',
        '[TOOL_CALLS]add[ARGS]{"a":5,"b":4}',
    ),
    '[TOOL_RESULTS]{"content": 5, "call_id": "fromModel"}[/TOOL_RESULTS]',
)
HARMONY = Form(
    "{% for m in messages %}{% if m.role == 'tool' %}<|start|>functions.add to=assistant"
    "<|channel|>commentary<|message|>{{ m.content }}<|end|>{% elif m.tool_calls %}"
    "{% if m.content %}<|start|>assistant<|channel|>analysis<|message|>{{ m.content }}<|end|>"
    "{% endif %}{% set c = m.tool_calls[0].function %}<|start|>assistant to=functions.{{ c.name }}"
    "<|channel|>commentary json<|message|>{{ c.arguments | tojson }}<|call|>"
    "{% elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "<|end|>{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}",
    ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>"),
    ("<|return|>", "<|call|>"),
    (
        '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a":2,"b":3}<|call|>',
        "<|channel|>analysis<|message|>now more<|end|><|start|>assistant<|channel|>commentary"
        ' to=functions.add <|constrain|>json<|message|>{"a": 5, "b": 4}<|call|>',
    ),
    "<|start|>functions.add to=assistant<|channel|>commentary<|message|>5<|end|><|start|>assistant",
    "<|channel|>final<|message|>now 9",
)
FORMS = {"qwen": QWEN, "coder": CODER, "llama": LLAMA, "mistral": MISTRAL, "gpt-oss": HARMONY}


def tokenizer_of(form: Form, **options: Any) -> Any:
    """Return a tokenizer of bytes and a few pairs of them, with the template of ``form``.

    Args:
        options: of the tokenizer's own.
    """
    letters = bytes_to_unicode()
    vocabulary = {letter: byte for byte, letter in letters.items()}
    for number, pair in enumerate(MERGES, 256):
        vocabulary["".join(pair)] = number
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=MERGES))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens([*form.special, *form.ends])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token=form.ends[0], chat_template=form.template, **options
    )


def letter_by_letter(tokenizer: Any, text: str) -> list[int]:
    """Return tokens of ``text`` that are not those that the tokenizer would make of it."""
    vocabulary = tokenizer.get_vocab()
    merged = ["".join(pair) for pair in MERGES]
    ids: list[int] = []
    for token in tokenizer.tokenize(text):
        ids += [vocabulary[part] for part in (token if token in merged else [token])]
    assert tokenizer.decode(ids) == text
    return ids


class Scripted(torch.nn.Module):
    """A causal language model that says what is written for it, one list of tokens a turn."""

    def __init__(self, tokenizer: Any, turns: Sequence[Sequence[int]], ends: Sequence[int]) -> None:
        super().__init__()
        self.config = SimpleNamespace(eos_token_id=None)
        self.generation_config = SimpleNamespace(eos_token_id=list(ends))
        self.device = torch.device("cpu")
        self.seen: list[list[int]] = []
        self._size = len(tokenizer)
        self._turns = iter(turns)

    @override
    def forward(self, input_ids: torch.Tensor, past_key_values: Any = None, **_: Any) -> Any:
        """Return logits that leave no choice."""
        left: Iterator[int] | None = past_key_values
        if left is None:
            self.seen.append(input_ids[0].tolist())
            left = iter(next(self._turns))
        logits = torch.full((1, 1, self._size), -torch.inf)
        logits[0, 0, next(left)] = 0.0
        return SimpleNamespace(logits=logits, past_key_values=left)
