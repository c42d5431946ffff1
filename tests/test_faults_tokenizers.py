"""Faults of group D: tokenizers and vocabularies. The numbers are the issue list's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import oracle
import pytest
import tokenizers
from click.testing import CliRunner
from kit_runtime import Recording
from tiny import build, byte_tokenizer, shared
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

import outpace
from outpace.cli import cli
from outpace.engine import Engine, Request
from outpace.errors import IncompatibleModels, InvalidRequest

NUM = 24
REAL = 57  # tokens that the tokenizer knows


def saved(
    folder: Path, *, vocab_size: int, tokenizer: PreTrainedTokenizerFast, seed: int = 0, **how: Any
) -> Path:
    """A folder with a tiny model and a tokenizer."""
    build(how.pop("family", "llama"), seed=seed, vocab_size=vocab_size, **how).save_pretrained(
        folder
    )
    tokenizer.save_pretrained(folder)
    return folder


# 22: the same tokenizer, other padding

PADDINGS = pytest.mark.parametrize(
    ("wide", "narrow"), [(64, 60), (60, 64), (64, 64), (57, 64)], ids="target {}".format
)


@PADDINGS
@pytest.mark.parametrize("seed", [0, 1], ids=["perfect draft", "other draft"])
def test_22_padded_models_of_a_family(tmp_path: Path, wide: int, narrow: int, seed: int) -> None:
    tokenizer = byte_tokenizer(REAL)
    folder = saved(tmp_path, vocab_size=narrow, tokenizer=tokenizer, seed=seed)
    target = build("llama", vocab_size=wide)
    llm = outpace.load(target, tokenizer=tokenizer, method="draft", draft=str(folder))
    method = Recording(llm.method)
    llm = llm.with_method(method)
    prompt = [3, 1, 4, 1, 5]
    right = oracle.greedy(oracle.recompute(target), prompt, max_new_tokens=NUM)
    oracle.assert_same(llm.generate(prompt, max_new_tokens=NUM).tokens, right)
    sampled: dict[str, Any] = dict(max_new_tokens=NUM, temperature=1.0, seed=5)
    plain = llm.with_method("plain").generate(prompt, **sampled)
    assert llm.generate(prompt, **sampled).tokens == plain.tokens
    llm.generate(prompt, acceptance="rejection", **sampled)
    assert len(method.proposed) > NUM
    assert max(method.proposed) < REAL, "padding was proposed"


def test_22_control_padding_is_what_these_models_like_too() -> None:
    target = build("llama", vocab_size=64)
    llm = outpace.load(target, tokenizer=byte_tokenizer(REAL))
    tokens = llm.generate([3, 1], max_new_tokens=200, temperature=1.5, seed=1).tokens
    assert any(token >= REAL for token in tokens), "the test above would prove nothing"


@pytest.mark.parametrize("method", ["plain", "lookup", "draft"])
@pytest.mark.parametrize("token", [57, 62, 63])
def test_22_an_id_without_text_does_no_harm(tmp_path: Path, method: str, token: int) -> None:
    tokenizer = byte_tokenizer(REAL)
    options = {}
    if method == "draft":
        options["draft"] = saved(tmp_path, vocab_size=60, tokenizer=tokenizer)
    llm = outpace.load(shared("llama"), tokenizer=tokenizer, method=method, **options)
    how: dict[str, Any] = dict(max_new_tokens=6, logit_bias={token: 100.0})
    result = llm.generate("012", stop=["zz"], **how)
    assert result.tokens == [token] * 6
    assert result.text == ""
    assert [piece.text for piece in llm.stream("012", **how)][-1] == ""


def test_22_another_vocabulary_is_refused_when_it_is_loaded(tmp_path: Path) -> None:
    folder = saved(tmp_path, vocab_size=64, tokenizer=byte_tokenizer(256))
    with pytest.raises(IncompatibleModels, match="id 0 is '0' in the target and"):
        outpace.load(
            shared("llama"), tokenizer=byte_tokenizer(REAL), method="draft", draft=str(folder)
        )


# 24: a draft with another tokenizer


def words(*, special: bool) -> PreTrainedTokenizerFast:
    """A vocabulary of words, in the way of Llama's: BOS first, spaces inside the tokens."""
    vocab = {text: i for i, text in enumerate(["<unk>", "<s>", "</s>", *"▁abcdefgu", "▁a", "▁b"])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("▁", "a"), ("▁", "b")]))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    if special:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 1)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def test_24_other_tokenizers_are_refused_naming_the_first_difference(tmp_path: Path) -> None:
    folder = saved(tmp_path, family="gpt2", vocab_size=64, tokenizer=byte_tokenizer(64))
    with pytest.raises(IncompatibleModels) as caught:
        outpace.load(
            shared("llama"), tokenizer=words(special=True), method="draft", draft=str(folder)
        )
    assert "id 0 is '<unk>' in the target and '0' in the draft" in str(caught.value)
    assert "use a draft of the target's family" in str(caught.value)


def test_24_the_same_tokens_in_another_order_are_another_vocabulary(tmp_path: Path) -> None:
    alphabet = bytes_to_unicode()
    vocab = {alphabet[48 + i]: i for i in range(REAL)}
    first, second = alphabet[48 + 20], alphabet[48 + 21]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    other = PreTrainedTokenizerFast(tokenizer_object=backend)
    folder = saved(tmp_path, vocab_size=64, tokenizer=other)
    with pytest.raises(IncompatibleModels, match="id 20 is 'D' in the target and 'E' in the draft"):
        outpace.load(shared("llama"), tokenizer=byte_tokenizer(REAL), method="draft", draft=folder)


def test_24_a_draft_of_another_architecture_with_the_same_tokens_is_welcome(tmp_path: Path) -> None:
    tokenizer = words(special=True)
    folder = saved(tmp_path, family="gpt2", vocab_size=64, tokenizer=tokenizer)
    llm = outpace.load(shared("llama"), tokenizer=tokenizer, method="draft", draft=str(folder))
    prompt = llm.model.tokenizer.encode("ab a g")  # type: ignore[union-attr]
    right = oracle.greedy(oracle.recompute(shared("llama")), prompt, max_new_tokens=64)
    method = Recording(llm.method)
    result = llm.with_method(method).generate("ab a g", max_new_tokens=64, ignore_eos=True)
    oracle.assert_same(result.tokens, right)
    assert all(token < 14 for token in method.proposed)
    assert method.seen[: len(prompt)] == prompt, "the ids themselves go to the draft"
    assert prompt.count(1) == 1
    assert prompt[0] == 1


def test_24_no_tokenizer_no_comparison(tmp_path: Path) -> None:
    folder = saved(tmp_path, vocab_size=64, tokenizer=byte_tokenizer(64))
    with pytest.raises(IncompatibleModels, match="the target has no tokenizer"):
        outpace.load(shared("llama"), method="draft", draft=str(folder))


# 25: one way from a prompt to its ids

TEMPLATES = {
    "without bos": "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}g",
    "with bos": "<s>{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}g",
}


def chat_model(folder: Path, *, special: bool, template: str | None) -> Path:
    tokenizer = words(special=special)
    tokenizer.chat_template = template
    return saved(folder, vocab_size=64, tokenizer=tokenizer)


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The ids of every request that reaches an engine."""
    seen: list[list[int]] = []
    add = Engine.add

    def spy(self: Engine, request: Request) -> None:
        seen.append(list(request.prompt))
        add(self, request)

    monkeypatch.setattr(Engine, "add", spy)
    return seen


def command(folder: Path, prompt: str, *arguments: str) -> None:
    args = ["generate", prompt, "--model", str(folder), "--max-new-tokens", "3", "--json"]
    result = CliRunner().invoke(cli, [*args, "--ignore-eos", *arguments])
    assert result.exit_code == 0, result.output
    assert len(json.loads(result.stdout)["tokens"]) == 3


TEXTS = ["ab a", "a</s>b", "<s>ab", "ab ", " ab"]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("special", [True, False], ids=["bos", "no bos"])
def test_25_raw_text(tmp_path: Path, prompts: list[list[int]], text: str, special: bool) -> None:
    folder = chat_model(tmp_path, special=special, template=None)
    llm = outpace.load(folder)
    for method in ("plain", "lookup", "lookahead"):
        llm.with_method(method).generate(text, raw=True, max_new_tokens=3)
        list(llm.with_method(method).stream(text, max_new_tokens=3))  # no template: the same
        llm.with_method(method).generate_batch([text], raw=True, max_new_tokens=3)
    command(folder, text, "--raw")
    command(folder, text, "--method", "lookup")
    assert len(prompts) == 11
    assert prompts == [words(special=special)(text)["input_ids"]] * 11


def test_25_control_texts_that_look_alike_have_other_ids() -> None:
    ids = [tuple(words(special=True)(text)["input_ids"]) for text in TEXTS]
    assert len({*ids[1:], ids[0]}) >= 4
    assert ids[3] != ids[0], "a trailing space counts"
    assert 2 in ids[1], "a special token's string is the token"


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("special", [True, False], ids=["bos", "no bos"])
def test_25_chat_messages(
    tmp_path: Path, prompts: list[list[int]], template: str, special: bool
) -> None:
    folder = chat_model(tmp_path, special=special, template=template)
    llm = outpace.load(folder)
    messages = [{"role": "user", "content": "ab a"}]
    for method in ("plain", "lookahead"):
        llm.with_method(method).generate(messages, max_new_tokens=3)
        llm.with_method(method).generate("ab a", max_new_tokens=3)
    command(folder, "ab a")
    assert prompts == [prompts[0]] * 5
    text = words(special=True).decode(prompts[0], skip_special_tokens=True)
    assert text.replace(" ", "") == "uabag"
    assert prompts[0].count(1) == int(special or template.startswith("<s>")), "BOS exactly once"
    assert 1 not in prompts[0][1:]
    raw = llm.model.tokenizer.encode("ab a")  # type: ignore[union-attr]
    llm.generate("ab a", raw=True, max_new_tokens=3)
    assert prompts[-1] == raw != prompts[0]


@pytest.mark.parametrize("template", [None, *TEMPLATES.values()], ids=["none", *TEMPLATES])
def test_25_an_empty_prompt_is_refused_everywhere(tmp_path: Path, template: str | None) -> None:
    folder = chat_model(tmp_path, special=False, template=template)
    llm = outpace.load(folder)
    calls: Sequence[Any] = (
        llm.generate,
        lambda p: list(llm.stream(p)),
        lambda p: llm.generate_batch([p]),
    )
    for call in calls:
        for prompt in ("", []):
            with pytest.raises(InvalidRequest, match="the prompt is empty"):
                call(prompt)
    result = CliRunner().invoke(cli, ["generate", "", "--model", str(folder)])
    assert result.exit_code == 2
    assert "the prompt is empty" in result.stderr
