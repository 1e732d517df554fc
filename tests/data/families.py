"""Eight families of chat templates, each with a small tokenizer of its kind, and random dialogs that they accept."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

FOLDER = Path(__file__).parent / "templates"
_CORPUS = [
    "the answer is the thing that the user asks for",
    "user assistant system [INST] model",
    "你好，世界",
    '{"name": "add"}',
] * 9


@dataclass(frozen=True)
class Family:
    """special: names of special tokens. added: other special tokens. sentencepiece: whether spaces are tokens of their own kind.

    calls: how many functions an answer may call at once. thinks: where an answer has its thoughts.
    """

    special: dict[str, str]
    added: tuple[str, ...] = ()
    sentencepiece: bool = False
    trim_offsets: bool = False
    calls: int = 0
    thinks: str = ""
    system: bool = True


_DEEPSEEK = ("User", "Assistant", "tool▁calls▁begin", "tool▁calls▁end", "tool▁call▁begin", "tool▁call▁end", "tool▁sep")
_DEEPSEEK += ("tool▁outputs▁begin", "tool▁outputs▁end", "tool▁output▁begin", "tool▁output▁end")
_MISTRAL = ("[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]")
FAMILIES = {
    "qwen2_5": Family({"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}, ("<|im_start|>",), calls=2),
    "qwen3": Family(
        {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}, ("<|im_start|>",), calls=2, thinks="reasoning_content"
    ),
    "llama3": Family(
        {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
        ("<|start_header_id|>", "<|end_header_id|>"),
        trim_offsets=True,
        calls=1,
    ),
    "mistral": Family({"bos_token": "<s>", "eos_token": "</s>"}, _MISTRAL, sentencepiece=True, calls=2),
    "gemma": Family({"bos_token": "<bos>", "eos_token": "<eos>"}, ("<start_of_turn>", "<end_of_turn>"), sentencepiece=True),
    "phi": Family({"bos_token": "<s>", "eos_token": "<|endoftext|>"}, ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>")),
    "deepseek": Family(
        {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"},
        tuple(f"<｜{name}｜>" for name in _DEEPSEEK),
        calls=2,
        thinks="content",
    ),
    "zephyr": Family({"bos_token": "<s>", "eos_token": "</s>"}, sentencepiece=True),
}


@cache
def backend(name: str) -> tokenizers.Tokenizer:
    """The tokenizer of a family: bytes with merges, or pieces of text with bytes for what is unknown."""
    family = FAMILIES[name]
    special = [*family.special.values(), *family.added]
    if family.sentencepiece:
        made = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        made.normalizer = normalizers.Replace(" ", "▁")
        made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        special += ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
        alphabet = [chr(i) for i in range(33, 127)] + ["▁", "\n"]
    else:
        made = tokenizers.Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        made.post_processor = processors.ByteLevel(trim_offsets=family.trim_offsets)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    texts = [text.replace(" ", "▁") for text in _CORPUS] if family.sentencepiece else _CORPUS
    made.train_from_iterator(texts, trainer)
    if family.sentencepiece:  # bytes are pieces of any text, not special tokens
        state = json.loads(made.to_str())
        state["added_tokens"] = [token for token in state["added_tokens"] if not token["content"].startswith("<0x")]
        made = tokenizers.Tokenizer.from_str(json.dumps(state))
    return made


def template(name: str, *, marked: bool) -> str:
    """The chat template of a family, with marks around what the assistant writes, or with the same white space and without."""
    source = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    if marked:
        return source
    for mark, plain in (("endgeneration", "endif"), ("generation", "if true")):
        source = source.replace(f"{{%- {mark} ", f"{{%- {plain} ").replace(f"{{% {mark} ", f"{{% {plain} ")
    return source


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds <two> numbers & says 'so'.",
            "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
        },
    }
]
_WORDS = (
    "the",
    "answer",
    "你好",
    "is",
    "é",
    "\n",
    "\n\n",
    "  ",
    "user",
    "👩‍👩‍👧",
    "<b>",
    "1.5e3",
    "assistant\n",
    "}",
    '"',
    "anchor0",
)


def _text(draw: random.Random) -> str:
    inner = " ".join(draw.choices(_WORDS, k=draw.randint(0, 6)))
    return draw.choice("abç世") + inner + draw.choice(("end", ".", "？", "}"))


Dialog = tuple[list[dict[str, object]], Sequence[object] | None]


def dialogs(name: str, count: int) -> list[Dialog]:
    """Random dialogs: with and without system message, tools, their calls and results, thoughts, one to four turns."""
    draw = random.Random(name)
    return [_dialog(FAMILIES[name], draw) for _ in range(count)]


def _dialog(family: Family, draw: random.Random) -> Dialog:
    with_tools = family.calls > 0 and draw.random() < 0.6
    messages: list[dict[str, object]] = []
    if family.system and draw.random() < 0.5:
        messages.append({"role": "system", "content": _text(draw)})
    for _ in range(draw.randint(1, 4)):
        messages.append({"role": "user", "content": _text(draw)})
        for _ in range(draw.randint(0, 2) if with_tools else 0):
            messages += _calls(family, draw)
        messages.append(_answer(family, draw, _text(draw)))
    return messages, TOOLS if with_tools else None


def _calls(family: Family, draw: random.Random) -> list[dict[str, object]]:
    count = draw.randint(1, family.calls)
    ids = ["".join(draw.choices("abc123", k=9)) for _ in range(count)]
    calls = [
        {"type": "function", "id": i, "function": {"name": "add", "arguments": {"a": draw.randint(0, 9), "b": _text(draw)}}}
        for i in ids
    ]
    content = _text(draw) if draw.random() < 0.3 else draw.choice(("", None))
    thinks = family.thinks if family.thinks != "content" else ""  # such a template leaves thoughts before a call as they are
    asked = {**_answer(replace(family, thinks=thinks), draw, content), "tool_calls": calls}
    return [asked, *({"role": "tool", "tool_call_id": i, "name": "add", "content": _text(draw)} for i in ids)]


def _answer(family: Family, draw: random.Random, content: str | None) -> dict[str, object]:
    message: dict[str, object] = {"role": "assistant", "content": content}
    if draw.random() < 0.2:
        message["tool_calls"] = None  # as rows have it that come from OpenAI
    if not family.thinks or draw.random() < 0.4:
        return message
    if family.thinks != "content" and draw.random() < 0.5:
        return {**message, draw.choice(("reasoning_content", "reasoning")): _text(draw)}
    return {**message, "content": f"<think>\n{_text(draw)}\n</think>\n\n{content or ''}"}
