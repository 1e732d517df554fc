"""Which tokens of a conversation are trained on."""

import datetime
import pathlib
import re
import subprocess
import sys
import threading
import time

import pytest
import transformers

from mpar import data
from mpar.errors import DataError

PLAIN_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = {
    "chatml": "{%- for m in messages %}{%- if m.role == 'assistant' %}<|start|>assistant\n"
    "{% generation %}{{ m.content }}<|end|>{% endgeneration %}\n{%- else %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n"
    "{%- endif %}{%- endfor %}",
    "spaces": "{% for m in messages %}{% if m.role == 'assistant' %} the assistant: {% generation %}{{ m.content | trim }}<|end|>"
    "{% endgeneration %}{% else %} {{ m.role }}: {{ m.content }}{% endif %}{% endfor %}",
    "indented": """{% for m in messages %}
        {% if m['role'] == 'assistant' %}
            {%- generation -%}
            {{ m['content'] }}<|end|>
            {%- endgeneration -%}
        {% else %}
            [INST] {{ m['content'] }} [/INST]
        {% endif %}
    {% endfor %}""",
    "macro": "{% macro turn(m) %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|end|>{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{% endmacro %}{% for m in messages %}<s>{{ turn(m) }}</s>{% endfor %}",
}
# what Qwen3 does: only the last answer shows its thinking block
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATS = {
    "one": [{"role": "user", "content": "who are you"}, {"role": "assistant", "content": "the assistant"}],
    "two": [
        {"role": "system", "content": "the system"},
        {"role": "user", "content": "你好 the user\n"},
        {"role": "assistant", "content": "你好！ the answer  \n\n is"},
        {"role": "user", "content": "the answer  \n\n is"},
        {"role": "assistant", "content": "the answer  \n\n is"},
    ],
    "empty": [{"role": "user", "content": "say nothing"}, {"role": "assistant", "content": ""}],
    "greeting": [{"role": "assistant", "content": "the answer"}, {"role": "user", "content": "the thing"}],
}


def with_template(tokenizer, template, tmp_path):
    tokenizer.save(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(template.encode())
    return data.Tokenizer.from_folder(tmp_path)


def trained_text(tokenizer, messages, **options):
    """The trained runs of a conversation as text."""
    ids, trained = tokenizer.encode_chat(messages, **options)
    runs, previous = [], False
    for token, wanted in zip(ids, trained, strict=True):
        if wanted:
            runs = [*runs, []] if not previous else runs
            runs[-1].append(token)
        previous = wanted
    return [tokenizer.decode(run) for run in runs]


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("template", MARKED)
def test_marked_spans_equal_those_of_transformers(merged_backend, template, chat):
    """Ids and mask are those of transformers' return_assistant_tokens_mask, with merges and trimmed offsets."""
    special = {"eos_token": "<|end|>"}
    tokenizer = data.Tokenizer(merged_backend, special=special, chat_template=MARKED[template])
    peer = transformers.PreTrainedTokenizerFast(tokenizer_object=merged_backend, **special)
    peer.chat_template = MARKED[template]
    expected = peer.apply_chat_template(CHATS[chat], tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    ids, trained = tokenizer.encode_chat(CHATS[chat])
    assert ids == expected["input_ids"]
    assert [int(t) for t in trained] == list(expected["assistant_masks"])


def test_span_that_begins_with_white_space(merged_backend):
    """It is trained whole; transformers loses it where offsets leave out white space, so the expectation is written out."""
    template = "{% for m in messages %}{{ m.role }}:{% generation %} {{ m.content }}<|end|>{% endgeneration %}{% endfor %}"
    tokenizer = data.Tokenizer(merged_backend, special={"eos_token": "<|end|>"}, chat_template=template)
    assert trained_text(tokenizer, [{"role": "assistant", "content": "the answer  "}]) == [" the answer  <|end|>"]


def test_white_space_at_both_ends_of_a_span(merged_backend):
    """Tokens of white space alone, whose offsets are empty, belong to the side that their text is on."""
    template = "{% for m in messages %}{{ m.role }}: \t {% generation %}{{ m.content }}{% endgeneration %}\t |{% endfor %}"
    tokenizer = data.Tokenizer(merged_backend, special={}, chat_template=template)
    for answer in ("\tthe answer", "\tthe answer\t  ", "\n \nthe\n \nanswer   "):
        assert trained_text(tokenizer, [{"role": "assistant", "content": answer}]) == [answer]


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("template", ["marked", "prefixes"])
def test_exactly_the_answers_and_their_end_are_trained(byte_tokenizer, tmp_path, template, chat):
    """By markers and by prefixes alike: the answer, its end token, not the line break behind, nothing else."""
    tokenizer = byte_tokenizer if template == "marked" else with_template(byte_tokenizer, PLAIN_CHATML, tmp_path)
    expected = [m["content"] + "<|im_end|>" for m in CHATS[chat] if m["role"] == "assistant"]
    assert trained_text(tokenizer, CHATS[chat]) == expected


def test_hand_written_mask(byte_tokenizer):
    """Byte for byte on a small conversation."""
    ids, trained = byte_tokenizer.encode_chat([{"role": "user", "content": "u"}, {"role": "assistant", "content": "é"}])
    assert ids == [257, *b"user\nu", 258, 10, 257, *b"assistant\n", 0xC3, 0xA9, 258, 10]
    assert trained == [False] * 20 + [True] * 3 + [False]


def test_content_that_repeats_the_template(byte_tokenizer, tmp_path):
    """A question that contains an answer's text is not mistaken for it."""
    tokenizer = with_template(byte_tokenizer, PLAIN_CHATML, tmp_path)
    chat = [{"role": "user", "content": "assistant\nyes"}, {"role": "assistant", "content": "assistant\nyes"}]
    ids, trained = tokenizer.encode_chat(chat)
    assert trained_text(tokenizer, chat) == ["assistant\nyes<|im_end|>"]
    assert trained.index(True) > len(ids) // 2


def test_content_of_private_use_characters(byte_tokenizer):
    """The characters that mark spans inside are never those of the text."""
    answer = "".join(map(chr, range(0xF0000, 0xF0040)))
    assert trained_text(byte_tokenizer, [{"role": "assistant", "content": answer}]) == [answer + "<|im_end|>"]


def test_line_break_that_ends_an_answer_is_trained(byte_tokenizer, tmp_path):
    """Where no special token closes an answer, the white space behind it does and stays."""
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    tokenizer = with_template(byte_tokenizer, template, tmp_path)
    assert trained_text(tokenizer, CHATS["one"]) == ["the assistant\n"]


def test_earlier_answers_without_their_thoughts(byte_tokenizer, tmp_path):
    """A template that shows thoughts in the last answer alone: what is trained on of the others is their text."""
    tokenizer = with_template(byte_tokenizer, THINKING, tmp_path)
    thoughts = "<think>\n\n</think>\n\n"
    assert trained_text(tokenizer, CHATS["two"]) == [
        "你好！ the answer  \n\n is<|im_end|>",
        f"{thoughts}the answer  \n\n is<|im_end|>",
    ]


@pytest.mark.parametrize(
    "shown",
    ["m.content[:4]", "m.content | upper", "'so it is'", "m.content + m.content"],
    ids=["cut", "changed", "another", "twice"],
)
def test_answers_that_change_later_are_refused(byte_tokenizer, tmp_path, shown):
    """An answer whose text is another once the conversation goes on has no span; the error says what to do. Others are used."""
    shown = f"{{% if m.role == 'assistant' and not loop.last %}}{{{{ {shown} }}}}{{% else %}}{{{{ m.content }}}}{{% endif %}}"
    tokenizer = with_template(byte_tokenizer, PLAIN_CHATML.replace("{{ m.content }}", shown), tmp_path)
    refused, used = tokenizer.encode_chats([(CHATS["two"], None), (CHATS["one"], None)])
    assert isinstance(refused, data.RenderError)
    assert re.search(r"message 2 of 5.*not prefix-stable.*generation %.*last_round", str(refused))
    assert any(used[1])


@pytest.mark.parametrize("template", ["marked", "thinking"])
def test_last_round(byte_tokenizer, tmp_path, template):
    """Only what follows the last user message is trained, also where the template shows earlier answers differently."""
    tokenizer = byte_tokenizer if template == "marked" else with_template(byte_tokenizer, THINKING, tmp_path)
    think = "" if template == "marked" else "<think>\n\n</think>\n\n"
    assert trained_text(tokenizer, CHATS["two"], weights=data.TokenWeights("last_round")) == [
        think + "the answer  \n\n is<|im_end|>"
    ]


def test_render_errors_name_the_roles(byte_tokenizer, tmp_path):
    """raise_exception in a template reaches the user with the roles at fault."""
    tokenizer = with_template(byte_tokenizer, "{{ raise_exception('roles must alternate') }}", tmp_path)
    with pytest.raises(data.RenderError, match=r"\['user', 'assistant'\]: roles must alternate"):
        tokenizer.apply_chat_template(CHATS["one"])


def test_template_cannot_reach_python(byte_tokenizer, tmp_path):
    """Templates come from downloads: the sandbox refuses attributes that lead out."""
    tokenizer = with_template(
        byte_tokenizer, "{{ messages.__class__.__mro__ }}{{ ''.__class__.__base__.__subclasses__() }}", tmp_path
    )
    with pytest.raises(data.RenderError, match="unsafe"):
        tokenizer.apply_chat_template(CHATS["one"])


def test_bad_template_is_refused(byte_tokenizer, tmp_path):
    """A syntax error is found when the tokenizer is read."""
    with pytest.raises(data.TemplateError, match="line 1"):
        with_template(byte_tokenizer, "{% for m in messages %}", tmp_path)


def test_date_is_an_argument(byte_tokenizer, tmp_path):
    """Templates see a date only where one is given, so that ids do not depend on the day."""
    template = "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% else %}none{% endif %}"
    tokenizer = with_template(byte_tokenizer, template, tmp_path)
    dated = data.Tokenizer.from_folder(tmp_path, date=datetime.date(2024, 7, 26))
    assert (tokenizer.render_chat([]), dated.render_chat([])) == ("none", "26 Jul 2024")


def test_no_template(merged_backend):
    """A tokenizer without a template says so."""
    with pytest.raises(data.TemplateError, match=r"chat_template\.jinja"):
        data.Tokenizer(merged_backend, special={}).encode_chat(CHATS["one"])


LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}{% endfor %}{% endfor %}{% endfor %}"
BAD_ROW = "{% if messages[0].content == 'bad' %}" + LOOP + "{% endif %}"


@pytest.mark.parametrize(
    ("source", "told"),
    [
        (LOOP, r"stopped after 3 s of computing"),
        ("{{ 'a' * 10**10 }}", "needs more than 768 MiB of memory"),
        ("{{ [0] * 10**10 }}", "needs more than 768 MiB of memory"),
    ],
    ids=["endless", "text", "list"],
)
def test_template_without_end_is_stopped(byte_tokenizer, tmp_path, source, told):
    """Time and memory are bounded, and the error names the file; nothing of it is left."""
    before, tokenizer = processes_of_templates(), with_template(byte_tokenizer, source, tmp_path)
    with pytest.raises(data.TemplateError, match=rf"{re.escape(str(tmp_path))}/chat_template\.jinja.*{told}"):
        tokenizer.apply_chat_template(CHATS["one"])
    assert processes_of_templates() == before


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("{% for m in messages if m.role == who %}{{ m.content }}{{ loop.index }}{% endfor %}", "who"),
        ("{% for k, v in extra.items() %}{{ k }}{{ v }}{% else %}{{ k }}{% endfor %}{{ messages }}", "extra, k"),
        ("{% macro f(style, n=size) %}{{ style }}{% endmacro %}{% if style %}{{ f(style) }}{% endif %}", "size, style"),
        ("{% if not on is defined %}{% set on = true %}{% endif %}{{ on }}", "on"),
    ],
)
def test_variables_of_a_template(byte_tokenizer, tmp_path, source, names):
    """Those of loops and macros are none, in these alone; another name is refused with all that there are."""
    tokenizer = with_template(byte_tokenizer, source, tmp_path)
    with pytest.raises(DataError, match=rf"reads no zebra; its variables are {names}$"):
        tokenizer.apply_chat_template(CHATS["one"], variables={"zebra": 1})


def test_conversations_before_the_one_that_does_not_end(byte_tokenizer, tmp_path):
    """They are encoded; the error comes in the place of the one that it is about."""
    tokenizer = with_template(byte_tokenizer, BAD_ROW + PLAIN_CHATML, tmp_path)
    bad = [{"role": "user", "content": "bad"}]
    encoded = tokenizer.encode_chats([(CHATS["one"], None), (CHATS["two"], None), (bad, None), (CHATS["one"], None)])
    assert [len(next(encoded)[0]) > 20 for _ in range(2)] == [True, True]
    with pytest.raises(data.TemplateError, match="stopped after"):
        next(encoded)


def test_one_process_serves_all_conversations(byte_tokenizer):
    """It is the same for many batches, and gone once the tokenizer is closed."""
    byte_tokenizer.close()
    before = processes_of_templates()
    long = [{"role": "user", "content": "q" * 10**6}, {"role": "assistant", "content": "a"}]
    assert len(list(byte_tokenizer.encode_chats([(long, None)] * 3))) == 3
    first = processes_of_templates()
    assert byte_tokenizer.apply_chat_template(CHATS["one"])
    assert processes_of_templates() == first and len(first) == len(before) + 1
    byte_tokenizer.close()
    assert processes_of_templates() == before


def test_a_thread_has_a_process_of_its_own(byte_tokenizer):
    """A process of a template ends with the thread that started it, so no other thread depends on it."""
    found = []
    thread = threading.Thread(target=lambda: found.append(byte_tokenizer.apply_chat_template(CHATS["one"])))
    thread.start()
    thread.join()
    assert found == [byte_tokenizer.apply_chat_template(CHATS["one"])]


@pytest.mark.parametrize("source", ["", LOOP], ids=["waits", "computes"])
def test_process_of_a_template_dies_with_its_parent(tmp_path, source):
    """Also if the parent is killed, and whatever the template is doing."""
    code = (
        "import sys, threading, mpar.data as data; from mpar.data import ChatTemplate; template = ChatTemplate(sys.argv[1], {})\n"
        "threading.Timer(0.5, lambda: print(template._process.pid, flush=True)).start()\n"
        "template.render([]); threading.Event().wait()"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, source], stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 2.5  # less than the template may compute
    while pathlib.Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    status = pathlib.Path(f"/proc/{child}/status")
    assert not status.exists() or "State:\tZ" in status.read_text()


def test_messages_that_are_no_json(byte_tokenizer):
    """They cannot be given to the process, and are refused like messages that the template refuses."""
    with pytest.raises(data.RenderError, match="it is not JSON"):
        byte_tokenizer.apply_chat_template([{"role": "user", "content": {1, 2}}])


def processes_of_templates() -> list[int]:
    """The processes of templates that this process has started."""
    found = pathlib.Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()
    return [int(pid) for pid in found if b"_template_process" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()]
