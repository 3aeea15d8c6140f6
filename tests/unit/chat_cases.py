"""Chat templates and conversations for the tests of chat prompts.

Six template shapes that published models use, written for these tests, and three conversations.

    TEMPLATES["chatml"], CONVERSATIONS["turns"]
"""

from __future__ import annotations

from typing import Any

from ingot.text.chat.chat_jinja import JinjaFormat

CHATML = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
INST = """\
{% if messages[0]['role'] == 'system' %}
    {% set system = '<<SYS>>\\n' + messages[0]['content'].strip() + '\\n<</SYS>>\\n\\n' %}
    {% set messages = messages[1:] %}
{% else %}
    {% set system = '' %}
{% endif %}
{% for message in messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Roles must alternate user and assistant') }}
    {% endif %}
    {% if message['role'] == 'user' %}
{{ bos_token + '[INST] ' + (system if loop.first else '') + message['content'] | trim + ' [/INST]' }}
    {%- else %}
{{ ' ' + message['content'] | trim + ' ' + eos_token }}
    {%- endif %}
{% endfor %}
"""
HEADERS = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '<|sep|>\\n\\n' + message['content'] | trim + '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant<|sep|>\\n\\n' }}{%- endif %}
"""
THINKING = """\
{%- if tools %}{{- 'Tools: ' }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}{%- endif %}
{%- set ns = namespace(last=messages | length - 1, found=false) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if not ns.found and message.role == "user" %}
        {%- set ns.found = true %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "assistant" and '</think>' in message.content %}
        {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
        {%- generation %}{{- '<|im_start|>assistant\\n' + content + '<|im_end|>\\n' }}{%- endgeneration %}
    {%- elif message.role == "skip" %}{%- continue %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
    endif %}
{%- endif %}
"""
# As Gemma's: the system's text goes into the first turn, and an assistant is a model.
GEMMA = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- set rest = messages[1:] -%}
{%- else -%}
    {%- set prefix = '' -%}
    {%- set rest = messages -%}
{%- endif -%}
{%- for message in rest -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Roles must alternate user and assistant") }}
    {%- endif -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' + (prefix if loop.first else '') }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}{{ item['text'] | trim }}{%- endfor -%}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}
"""
DATED = (
    "{{ strftime_now('%Y') }} {{ {'a': '<é>'} | tojson }} "
    "{{ dict(a=messages[0].content) | tojson(indent=2) }}\n"
)
TEMPLATES = {"chatml": CHATML, "inst": INST, "headers": HEADERS, "thinking": THINKING}
TEMPLATES |= {"gemma": GEMMA, "dated": DATED}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": "Hello! 你好 😀"}],
    "system": [
        {"role": "system", "content": " Be brief.\n"},
        {"role": "user", "content": "  a\n\n b <b>&'\" "},
    ],
    "turns": [
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nUno"},
        {"role": "user", "content": "Two\n"},
    ],
}


def jinja(source: str, **named: str) -> JinjaFormat:
    """A template as if read from here.jinja."""
    return JinjaFormat(source, "here.jinja", named)


def user(content: Any) -> list[dict[str, Any]]:
    """A conversation of one message."""
    return [{"role": "user", "content": content}]
