"""Chat templates like those of well-known models, each with a twin in plain Python that says what is learnt.

A twin writes a conversation as pieces of text and says of each whether the assistant wrote it; None where the template
refuses the conversation.
"""
# ruff: noqa: E501 - templates

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Pieces = list[tuple[str, bool]]
Messages = list[dict[str, Any]]
BOS, EOS = "<s>", "</s>"


def plain(lead: Callable[[str], str], end: str, behind: str = "", trims: bool = False, first: str = "") -> Any:
    """Templates that write every turn alike: lead-in, content, end mark, what is behind it."""

    def twin(messages: Messages) -> Pieces:
        found: Pieces = [(first, False)]
        for m in messages:
            content = m["content"].strip() if trims else m["content"]
            found += [(lead(m["role"]), False), (content + end, m["role"] == "assistant"), (behind, False)]
        return found

    return twin


def alternating(messages: Messages) -> bool:
    return all((m["role"] == "user") == (i % 2 == 0) and m["role"] != "tool" for i, m in enumerate(messages))


def llama2(messages: Messages) -> Pieces | None:
    system = ""
    if messages[0]["role"] == "system":
        system, messages = f"<<SYS>>\n{messages[0]['content']}\n<</SYS>>\n\n", messages[1:]
    if not alternating(messages) or any(m["role"] == "system" for m in messages):
        return None
    found: Pieces = []
    for i, m in enumerate(messages):
        if m["role"] == "user":
            found.append((f"{BOS}[INST] {system if i == 0 else ''}{m['content'].strip()} [/INST]", False))
        else:
            found.append((f" {m['content'].strip()} {EOS}", True))
    return found


def mistral(messages: Messages) -> Pieces | None:
    if not alternating(messages) or any(m["role"] == "system" for m in messages):
        return None
    found: Pieces = [(BOS, False)]
    for m in messages:
        if m["role"] == "user":
            found.append((f"[INST] {m['content']}[/INST]", False))
        else:
            found.append((f" {m['content']}{EOS}", True))
    return found


def gemma(messages: Messages) -> Pieces | None:
    if any(m["role"] == "system" for m in messages):
        return None
    found: Pieces = [(BOS, False)]
    for m in messages:
        role = "model" if m["role"] == "assistant" else m["role"]
        found += [(f"<start_of_turn>{role}\n", False)]
        found += [(m["content"].strip() + "<end_of_turn>", role == "model"), ("\n", False)]
    return found


def qwen(messages: Messages) -> Pieces | None:
    if messages[0]["role"] == "assistant":
        return None  # what would come before it has no first message, which the template looks at
    chatml = plain(lambda role: f"<|im_start|>{role}\n", "<|im_end|>", "\n")
    if messages[0]["role"] != "system":
        messages = [{"role": "system", "content": "You are a helpful assistant."}, *messages]
    return chatml(messages)


def thinking(messages: Messages) -> Pieces | None:
    """Thoughts of earlier answers are left out, so those turns are written differently once others follow."""
    last = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
    found: Pieces = []
    for i, m in enumerate(messages):
        content, thought = m["content"], ""
        if m["role"] == "assistant":
            if "</think>" in content:
                thought, _, content = content.partition("</think>")
                thought, content = thought.rpartition("<think>")[2].strip("\n"), content.lstrip("\n")
            if i > last:
                content = f"<think>\n{thought}\n</think>\n\n{content}"
        found += [(f"<|im_start|>{m['role']}\n", False), (content + "<|im_end|>", m["role"] == "assistant")]
        found += [("\n", False)]
    return found


def newline(messages: Messages) -> Pieces:
    """No mark but the line break: that ends the turn, and is learnt."""
    found: Pieces = []
    for m in messages:
        if m["role"] == "assistant":
            found += [("Assistant:", False), (f" {m['content']}\n", True)]
        else:
            found += [(f"{m['role'].title()}: {m['content']}\n", False)]
    return found


CHATML = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
CUE = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
REFUSES = "{% if m.role in ('system', 'tool') %}{{ raise_exception('only user and assistant') }}{% endif %}"
ALTERNATES = (
    REFUSES
    + "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
)
HEADER = "<|start_header_id|>%s<|end_header_id|>\n\n"

TWINS: dict[str, tuple[str, Callable[[Messages], Pieces | None]]] = {
    "llama-2": (
        "{% if messages[0].role == 'system' %}{% set system = '<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n' %}"
        "{% set rest = messages[1:] %}{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}"
        "{% for m in rest %}" + ALTERNATES + "{% if m.role == 'user' %}"
        "{{ bos_token + '[INST] ' + (system if loop.first else '') + m.content | trim + ' [/INST]' }}"
        "{% else %}{{ ' ' + m.content | trim + ' ' + eos_token }}{% endif %}{% endfor %}",
        llama2,
    ),
    "llama-3": (
        "{{ bos_token }}{% for m in messages %}"
        + HEADER % "{{ m.role }}"
        + "{{ m.content | trim }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}{{ '" + HEADER % "assistant" + "' }}{% endif %}",
        plain(lambda role: HEADER % role, "<|eot_id|>", trims=True, first=BOS),
    ),
    "mistral": (
        "{{ bos_token }}{% for m in messages %}" + ALTERNATES + "{% if m.role == 'user' %}"
        "{{ '[INST] ' + m.content + '[/INST]' }}{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}",
        mistral,
    ),
    "gemma": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim + "
        "'<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
        gemma,
    ),
    "qwen": (
        "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
        "{% for m in messages %}"
        + CHATML.replace("\n", "{{ '\n' }}")
        + "{% endfor %}"
        + CUE.replace("\n", "{{ '\n' }}"),
        qwen,
    ),
    "thinking": (
        "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
        "{% endif %}{% endfor %}{% for m in messages %}{% set said = m.content %}{% set thought = '' %}"
        "{% if m.role == 'assistant' %}{% if '</think>' in said %}"
        "{% set thought = said.split('</think>', 1)[0].rpartition('<think>')[2].strip('\n') %}"
        "{% set said = said.split('</think>', 1)[1].lstrip('\n') %}{% endif %}{% if loop.index0 > ns.last %}"
        "{% set said = '<think>\n' + thought + '\n</think>\n\n' + said %}{% endif %}{% endif %}"
        "{{ '<|im_start|>' + m.role + '\n' + said + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        thinking,
    ),
    "newline": (
        "{% for m in messages %}{{ ('Assistant: ' if m.role == 'assistant' else m.role.title() + ': ') + m.content + '\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}",
        newline,
    ),
}

MARKED = {
    "appends": (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "rewrites": (  # only the last answer is written out
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}[{%- generation -%}"
        "{{ m.content if loop.last else m.content[:3] }}]{%- endgeneration -%}{% else %}({{ m.content | trim }}){% endif %}"
        "{% endfor %}{% if add_generation_prompt %}[{% endif %}"
    ),
}
"""Templates that mark what the assistant wrote; transformers is their oracle."""

REASONS = (
    "{% for m in messages %}{{ '<' + m.role + '>' }}{% if m.thinking %}{{ '(' + m.thinking + ')' }}{% endif %}"
    "{{ m.content + '</s>' }}{% endfor %}{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
"""Writes what was thought, under one of its names."""
