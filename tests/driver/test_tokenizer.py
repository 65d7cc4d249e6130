"""Encoding, decoding and chat templates, held against transformers."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from driver.tokenizer import Tokenizer, TokenizerError, load_tokenizer
from scheduler.params import InvalidRequest
from tests.models import ASSISTANT_ID, CHAT_TEMPLATE, END, END_ID, USER_ID, make_byte_tokenizer

CONVERSATION = [
    {"role": "user", "content": "hé 🙂"},
    {"role": "assistant", "content": 'say "x"\nand <b>'},
    {"role": "user", "content": "  again  "},
]

# What real templates do, one thing each.
TEMPLATES = {
    "tiny": CHAT_TEMPLATE,
    "whitespace": "{% for m in messages %}\n   {% if loop.first %}\n1\n   {% endif %}\n{{ m.content }}\n{% endfor %}",
    "dashes": "{%- for m in messages -%}\n  {{- m['role'] + ': ' + m['content'] | trim -}} \n {%- endfor -%} .",
    "json": "{{ messages | tojson }}|{{ messages[0] | tojson(indent=2) }}",
    "controls": "{% for m in messages %}{% if loop.index0 == 1 %}{% continue %}{% endif %}{{ m.content }}{% endfor %}",
    "break": "{% for m in messages %}{{ m.content }}{% break %}{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %};{% endfor %}",
    "prompt": "{% if add_generation_prompt %}go{% else %}stay{% endif %}",
    "tools": "{% if tools %}tools{% endif %}{% if documents %}documents{% endif %}{{ tools is none }}",
    "end token": "{{ messages[0].content }}{{ eos_token }}",
    "no begin token": "{{ bos_token }}{{ messages[0].content }}",
    "maybe begin token": "{% if bos_token is defined %}{{ bos_token }}{% endif %}{{ messages[0].content }}",
    "undefined": "[{{ nothing }}]{% if nothing is defined %}?{% endif %}",
    "macro": "{% macro turn(m) %}<{{ m.role }}>{{ m.content }}{% endmacro %}{{ turn(messages[-1]) }}",
    "methods": "{{ messages[2].content.strip().upper() }}{{ messages[1].content.split('\n')[-1] }}",
    "date": "{{ strftime_now('%Y') }}",
}

REFUSING = {
    "raise_exception": "{{ raise_exception('roles must alternate') }}",
    "class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__['__builtins__'] }}",
    "mutation": "{% set _ = messages.append(1) %}",
    "syntax": "{% for m in messages %}{{ m.content }}",
    "attribute of undefined": "{{ messages[0].nothing.more }}",
    "type": "{{ 'a' + 1 }}",
    "division": "{{ 1 // 0 }}",
    "value": "{{ 'abc'.index('z') }}",
    "endless": "{% for i in range(10 ** 9) %}{% endfor %}",
    "include": "{% include '/etc/passwd' %}",
}


@pytest.fixture
def byte_tokenizer(tmp_path: Path) -> Tokenizer:
    return Tokenizer(make_byte_tokenizer(tmp_path))


def with_template(folder: Path, template: Any) -> Tokenizer:
    return Tokenizer(make_byte_tokenizer(folder, eos_token=END, chat_template=template))


@pytest.mark.parametrize("text", ["", "abc", " leading", "trailing \n", "日本語 🙂 é", "\x00\x7f"])
def test_text_is_its_bytes_and_back(byte_tokenizer: Tokenizer, text: str) -> None:
    ids = byte_tokenizer.encode(text)
    assert ids == list(text.encode())
    assert byte_tokenizer.decode(ids) == text


def test_special_tokens_are_read_and_not_shown(byte_tokenizer: Tokenizer) -> None:
    assert byte_tokenizer.encode("a<|end|>b") == [97, END_ID, 98]
    assert byte_tokenizer.decode([97, END_ID, 98]) == "ab"


def test_ids_without_text_decode_to_nothing(byte_tokenizer: Tokenizer) -> None:
    assert byte_tokenizer.decode([97, 300, 98, 270]) == "ab"


def test_ids_agree_with_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    make_byte_tokenizer(tmp_path)
    ours, theirs = Tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for text in ("abc <|user|> 日本 🙂", "", "\n\n x"):
        assert ours.encode(text) == theirs(text).input_ids


def test_a_stored_truncation_or_padding_is_not_applied(tmp_path: Path) -> None:
    import tokenizers

    path = make_byte_tokenizer(tmp_path) / "tokenizer.json"
    backend = tokenizers.Tokenizer.from_file(str(path))
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    backend.save(str(path))
    assert Tokenizer(tmp_path).encode("longer than four") == list(b"longer than four")
    assert Tokenizer(tmp_path).encode("ab") == list(b"ab")


@pytest.mark.parametrize("eos_token", [END, {"content": END, "special": True}])
def test_end_token_is_the_one_the_tokenizer_names(tmp_path: Path, eos_token: Any) -> None:
    assert Tokenizer(make_byte_tokenizer(tmp_path, eos_token=eos_token)).end_token_ids == {END_ID}


@pytest.mark.parametrize("eos_token", [None, "<|unheard of|>"])
def test_without_an_end_token_nothing_ends(tmp_path: Path, eos_token: str | None) -> None:
    assert Tokenizer(make_byte_tokenizer(tmp_path, eos_token=eos_token)).end_token_ids == frozenset()


# ---- chat templates


def test_a_chat_ends_where_the_assistant_answers(byte_tokenizer: Tokenizer) -> None:
    ids = byte_tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    assert ids == [USER_ID, *b"hi", END_ID, *b"\n", ASSISTANT_ID]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_chat_is_laid_out_as_by_transformers(tmp_path: Path, name: str) -> None:
    from transformers import AutoTokenizer

    ours = with_template(tmp_path, TEMPLATES[name])
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    text = theirs.apply_chat_template(CONVERSATION, tokenize=False, add_generation_prompt=True)
    got = ours.encode_chat(CONVERSATION)
    shown = ours._backend.decode(got, skip_special_tokens=False)
    assert shown == text
    assert got == theirs(text, add_special_tokens=False).input_ids


def test_a_template_of_its_own_file_comes_first(tmp_path: Path) -> None:
    make_byte_tokenizer(tmp_path, chat_template="settings")
    (tmp_path / "chat_template.jinja").write_text("file {{ messages[0].content }} é", encoding="utf-8")
    assert Tokenizer(tmp_path).encode_chat(CONVERSATION) == list("file hé 🙂 é".encode())


def test_of_several_templates_the_default_is_taken(tmp_path: Path) -> None:
    templates = [{"name": "rag", "template": "no"}, {"name": "default", "template": "yes"}]
    assert with_template(tmp_path, templates).encode_chat(CONVERSATION) == list(b"yes")


@pytest.mark.parametrize("name", REFUSING)
def test_a_template_that_fails_refuses_the_request(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidRequest, match="chat template refuses"):
        with_template(tmp_path, REFUSING[name]).encode_chat(CONVERSATION)


def test_the_reason_a_template_gives_is_told(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        with_template(tmp_path, REFUSING["raise_exception"]).encode_chat(CONVERSATION)


def test_a_template_serves_again_after_it_refused(tmp_path: Path) -> None:
    tokenizer = with_template(
        tmp_path, "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}ok"
    )
    with pytest.raises(InvalidRequest, match="user first"):
        tokenizer.encode_chat([{"role": "assistant", "content": ""}])
    assert tokenizer.encode_chat(CONVERSATION) == list(b"ok")


def test_a_chat_without_a_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        with_template(tmp_path, None).encode_chat(CONVERSATION)


# ---- files


def test_a_folder_without_tokenizer_gives_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert load_tokenizer(tmp_path) is None


def test_a_folder_with_a_tokenizer_gives_it(tmp_path: Path) -> None:
    assert load_tokenizer(make_byte_tokenizer(tmp_path)).encode("a") == [97]


@pytest.mark.parametrize("damage", ["truncated", "empty", "not a tokenizer", "binary"])
def test_a_damaged_tokenizer_file_is_named(tmp_path: Path, damage: str) -> None:
    path = make_byte_tokenizer(tmp_path) / "tokenizer.json"
    whole = path.read_bytes()
    damaged = {
        "truncated": whole[: len(whole) // 2],
        "empty": b"",
        "not a tokenizer": json.dumps({"a": 1}).encode(),
        "binary": bytes(range(256)),
    }
    path.write_bytes(damaged[damage])
    with pytest.raises(TokenizerError, match=str(tmp_path)):
        load_tokenizer(tmp_path)


def test_damaged_settings_are_named(tmp_path: Path) -> None:
    path = make_byte_tokenizer(tmp_path) / "tokenizer_config.json"
    path.write_text('{"eos_token": ')
    with pytest.raises(TokenizerError, match=str(path)):
        load_tokenizer(tmp_path)


def test_a_tokenizer_without_settings_serves(tmp_path: Path) -> None:
    (make_byte_tokenizer(tmp_path) / "tokenizer_config.json").unlink()
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("a") == [97]
    assert tokenizer.end_token_ids == frozenset()


# ---- damaged files

SMALL = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [
        {
            "id": 5,
            "content": "<end>",
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
    ],
    "normalizer": {"type": "NFC"},
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    "post_processor": None,
    "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    "model": {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "vocab": {"a": 0, "b": 1, "c": 2, "ab": 3, "abc": 4, "<end>": 5},
        "merges": [["a", "b"], ["ab", "c"]],
    },
}
JUNK: list[Any] = [None, True, -1, 1 << 40, 1e308, "", "x", [], {}, [[]], {"type": "Sequence"}, [None]]


def test_the_small_tokenizer_is_whole(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(SMALL))
    assert Tokenizer(tmp_path).encode("abc<end>") == [4, 5]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


@pytest.mark.parametrize("place", list(places(SMALL)), ids=str)
def test_any_tokenizer_file_is_read_or_refused(tmp_path: Path, place: tuple[Any, ...]) -> None:
    for value in JUNK:
        content = copy.deepcopy(SMALL)
        holder = functools.reduce(lambda inner, key: inner[key], place[:-1], content)
        holder[place[-1]] = value
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        with contextlib.suppress(TokenizerError, InvalidRequest):
            tokenizer = Tokenizer(tmp_path)
            ids = tokenizer.encode("abc<end> ba")
            assert isinstance(tokenizer.decode(ids), str)
            assert tokenizer.longest_token > 0
            assert Tokenizer.from_parts(tokenizer.parts()).encode("abc<end> ba") == ids


@pytest.mark.parametrize("name", ["bos_token", "eos_token", "chat_template"])
@pytest.mark.parametrize("value", JUNK, ids=str)
def test_any_setting_is_taken_or_refused(tmp_path: Path, name: str, value: Any) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(SMALL))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({name: value}))
    with contextlib.suppress(TokenizerError, InvalidRequest):
        tokenizer = Tokenizer(tmp_path)
        assert isinstance(tokenizer.end_token_ids, frozenset)
        tokenizer.encode_chat([{"role": "user", "content": "abc"}])


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer_config.json", b"[" * 100_000),
        ("tokenizer_config.json", b"\xff\xfe"),
        ("tokenizer_config.json", b"[]"),
        ("chat_template.jinja", b"\xff\xfe"),
        ("tokenizer.json", b"[" * 100_000),
        ("tokenizer.json", b""),
    ],
)
def test_a_file_that_is_none_is_named(tmp_path: Path, file: str, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(SMALL))
    (tmp_path / file).write_bytes(content)
    with pytest.raises(TokenizerError, match=str(tmp_path)):
        Tokenizer(tmp_path)
