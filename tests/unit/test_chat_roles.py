"""The developer role in formats with and without it, and an assistant's refusals."""

from __future__ import annotations

from typing import Any

import pytest

from ingot.errors import RequestError
from ingot.text.chat.chat_format import ChatFormat, ChatML, Vicuna
from tests.unit.chat_cases import CHATML, CONVERSATIONS, TEMPLATES, jinja

TURN = "{{ '<' + message.role + '>' + message.content }}"
DROPS = (
    "{% for message in messages %}"
    "{% if message.role in ['system', 'user', 'assistant'] %}" + TURN + "{% endif %}{% endfor %}"
)
REFUSES = (
    "{% for message in messages %}{% if message.role == 'developer' %}"
    "{{ raise_exception('no developers here') }}{% endif %}" + TURN + "{% endfor %}"
)
FORGETS = (  # it names the role, and writes nothing of what it says
    "{% for message in messages %}{% if message.role == 'developer' %}<developer>"
    "{% else %}" + TURN + "{% endif %}{% endfor %}"
)
HAS = (
    "{% for message in messages %}{% if message.role in ('system', 'developer') and loop.first %}"
    "{{ '<instructions of the ' + message.role + '>' + message.content }}"
    "{% else %}" + TURN + "{% endif %}{% endfor %}"
)
WITHOUT: dict[str, ChatFormat] = {
    "any role": jinja(CHATML, bos_token=""),
    "drops": jinja(DROPS),
    "refuses": jinja(REFUSES),
    "forgets": jinja(FORGETS),
    "chatml": ChatML(),
    "vicuna": Vicuna(),
}


def messages(*roles: str) -> list[dict[str, Any]]:
    return [{"role": role, "content": f"what the {role} says"} for role in roles]


@pytest.mark.parametrize("name", WITHOUT)
def test_a_developer_is_the_system_where_a_format_has_no_such_role(name: str) -> None:
    chat = WITHOUT[name]
    as_system = messages("developer", "user", "assistant", "user")
    as_system[0]["role"] = "system"
    given = messages("developer", "user", "assistant", "user")
    assert chat.prompt_text(given) == chat.prompt_text(as_system)
    assert "what the developer says" in chat.prompt_text(given)
    assert given[0]["role"] == "developer"


@pytest.mark.parametrize("name", WITHOUT)
def test_a_developer_message_after_the_system_message_joins_it(name: str) -> None:
    joined = messages("system", "user")
    joined[0]["content"] = "what the system says\n\nwhat the developer says"
    chat = WITHOUT[name]
    assert chat.prompt_text(messages("system", "developer", "user")) == chat.prompt_text(joined)


def test_a_developer_between_turns_is_the_system_s_message_there() -> None:
    assert WITHOUT["drops"].prompt_text(messages("user", "developer", "user")) == (
        "<user>what the user says<system>what the developer says<user>what the user says"
    )


def test_a_template_that_has_the_role_is_given_it() -> None:
    assert jinja(HAS).prompt_text(messages("developer", "user")) == (
        "<instructions of the developer>what the developer says<user>what the user says"
    )
    both = jinja(HAS).prompt_text(messages("system", "developer", "user"))
    assert "<developer>what the developer says" in both


@pytest.mark.parametrize("name", TEMPLATES)
def test_nothing_changes_without_a_developer(name: str) -> None:
    chat = jinja(TEMPLATES[name], bos_token="<s>", eos_token="</s>")
    chat.prompt_text(CONVERSATIONS["one"])
    assert "_has_developer" not in vars(chat)  # no template is asked before it matters


REFUSAL = {"type": "refusal", "refusal": "No."}


@pytest.mark.parametrize(
    "answer",
    [
        {"content": [REFUSAL]},
        {"content": [{"type": "text", "text": "N"}, {"type": "refusal", "refusal": "o."}]},
        {"content": None, "refusal": "No."},
        {"content": "No.", "refusal": None},
    ],
)
def test_what_an_assistant_refused_is_its_text(answer: dict[str, Any]) -> None:
    talk = [*messages("user"), {"role": "assistant", **answer}, *messages("user")]
    plain = [*messages("user"), {"role": "assistant", "content": "No."}, *messages("user")]
    for chat in (WITHOUT["any role"], WITHOUT["chatml"]):
        assert chat.prompt_text(talk) == chat.prompt_text(plain)


@pytest.mark.parametrize(
    ("message", "reported"),
    [
        ({"role": "user", "content": [REFUSAL]}, r"messages\[0\].content\[0\] is not a text part"),
        ({"role": "user", "content": None, "refusal": "No."}, r"messages\[0\].content is not text"),
        (
            {"role": "assistant", "content": [{"type": "refusal", "text": "No."}]},
            r"messages\[0\].content\[0\].refusal must be a string",
        ),
    ],
)
def test_other_templates_are_not_affected(message: dict[str, Any], reported: str) -> None:
    with pytest.raises(RequestError, match=reported):
        WITHOUT["any role"].prompt_text([message])
