"""Chat templates render as in transformers, within bounds."""

import time

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from gateway_svc.text import chat_template
from gateway_svc.text.chat_template import ChatTemplate
from svc_common.errors import FailedPrecondition, InvalidArgument
from tests.support.services import models

MESSAGES = [
    {"role": "system", "content": "Be <brief> & 'exact'."},
    {"role": "user", "content": "Grüße 😀\n  indented"},
    {"role": "assistant", "content": "ok"},
    {"role": "user", "content": "more"},
]

SOURCES = {
    "built-in": (models.TINY / "chat_template.jinja").read_text(),
    "blocks are trimmed": "{% for m in messages %}\n  {% if m.role == 'user' %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}end",
    "loop controls": "{% for m in messages %}{% if loop.index0 == 1 %}{% continue %}{% endif %}{{ m.role }};{% endfor %}",
    "tojson does not escape": "{{ messages | tojson }}|{{ messages[0] | tojson(indent=2) }}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "date": "{{ strftime_now('%Y') }}",
    "generation tag": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "special tokens": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}",
    "undefined": "{{ tools }}{{ nothing }}{% if add_generation_prompt %}>{% endif %}",
}


@pytest.mark.parametrize("name", SOURCES)
def test_renders_as_transformers_does(name: str) -> None:
    """Equal output for the features that published templates use."""
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    expected, _ = render_jinja_template([MESSAGES], chat_template=SOURCES[name], add_generation_prompt=True, **special)
    assert ChatTemplate(SOURCES[name], special).render(MESSAGES) == expected[0]


def test_a_refusal_of_the_template_names_the_messages() -> None:
    """raise_exception is the caller's mistake, in the template's own words."""
    with pytest.raises(InvalidArgument, match="Unknown role: …") as caught:
        models.tiny().apply_chat_template([{"role": "wizard", "content": "x"}])
    assert caught.value.violations[0].field == "messages"


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("{{ raise_exception('Roles must alternate') }}", "refused by the chat template: Roles must alternate"),
        ("{{ raise_exception('Bad: ' + messages[0].content) }}", "Bad: …"),
        ("{{ raise_exception(messages[0].content) }}", "left out"),
        ("{{ messages[0].content | int + 'a' }}", "TypeError"),
        ("{{ messages[0].content.encode(messages[0].content) }}", "LookupError"),
        ("{{ messages[0][messages[0].content].x }}", "UndefinedError"),
        ("{{ messages[0].thoughts.text }}", "has no attribute 'thoughts'"),
        ("{{ {}[messages[0].content] + 1 }}", "do not fit"),
        ("{{ '%d' % messages[0].content }}", "TypeError"),
        ("{{ messages[0].content.index('zz') }}", "ValueError"),
    ],
)
def test_errors_of_a_template_never_quote_the_conversation(source: str, told: str) -> None:
    """A client's text is in no error, whatever its wording; names of the template's own are reported."""
    secret = [{"role": "user", "content": "canary-1f"}]
    with pytest.raises(InvalidArgument) as caught:
        ChatTemplate(source, {}).render(secret)
    message = str(caught.value)
    assert told in message and "canary" not in message, message


def test_an_endless_template_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop without output would otherwise hold a thread for ever."""
    monkeypatch.setattr(chat_template, "MAX_RENDER_S", 0.2)
    source = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    begin = time.monotonic()
    with pytest.raises(InvalidArgument, match="longer than"):
        ChatTemplate(source, {}).render(MESSAGES)
    assert time.monotonic() - begin < 5


def test_too_much_output_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Output is bounded, whatever the template multiplies."""
    monkeypatch.setattr(chat_template, "MAX_OUTPUT_CHARS", 1000)
    with pytest.raises(InvalidArgument, match="more than 1000 characters"):
        ChatTemplate("{% for i in range(500) %}{{ messages[0].content }}{% endfor %}", {}).render(MESSAGES)


@pytest.mark.parametrize("source", ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}"])
def test_the_sandbox_holds(source: str) -> None:
    """Neither Python's internals nor changes of the caller's data."""
    before = [dict(message) for message in MESSAGES]
    try:
        text = ChatTemplate(source, {}).render(MESSAGES)
    except InvalidArgument:
        text = ""
    assert "class" not in text
    assert before == MESSAGES


def test_a_template_that_does_not_compile_spoils_chat_only() -> None:
    """Plain prompts still work with such a model."""
    with pytest.raises(FailedPrecondition, match="does not compile"):
        ChatTemplate("{% for %}", {})
    model = models.TextModel(models.fallback_tokenizer(), chat_template="{% for %}")
    assert model.decode(model.encode("lo")) == "lo"
    with pytest.raises(FailedPrecondition):
        model.apply_chat_template(MESSAGES)


def test_a_model_without_a_template_says_so() -> None:
    """With what to do instead."""
    with pytest.raises(InvalidArgument, match="plain prompt"):
        models.fallback().apply_chat_template(MESSAGES)
