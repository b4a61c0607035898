"""The built-in chat templates, by name.

Each renders a conversation to the same tokens as the template of its model family. All but chatml and zephyr mark the
assistant's text, including its end-of-turn token, with `{% generation %}`. `chat_template.py` selects one for a run.
"""

from __future__ import annotations

from typing import NamedTuple


class BuiltIn(NamedTuple):
    """A built-in chat template."""

    text: str
    """The template in Jinja."""
    markers: tuple[str, ...]
    """The markers that should be single tokens."""
    end: str | None
    """The end-of-turn token; None if that is the tokenizer's EOS token."""


def _assistant_text(text: str) -> str:
    """A Jinja expression, inside a `{% generation %}` block if the message `m` is the assistant's."""
    marked = f"{{% generation %}}{{{{ {text} }}}}{{% endgeneration %}}"
    return f"{{% if m.role == 'assistant' %}}{marked}{{% else %}}{{{{ {text} }}}}{{% endif %}}"


def _generation_prompt(text: str) -> str:
    return f"{{% if add_generation_prompt %}}{{{{ {text!r} }}}}{{% endif %}}"


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ZEPHYR = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '</s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' }}"
    + _assistant_text("m.content | trim + '<|eot_id|>'")
    + "{% endfor %}"
    + _generation_prompt("<|start_header_id|>assistant<|end_header_id|>\n\n")
)
ALTERNATE = (
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) or m.role not in ('user', 'assistant') %}"
    "{{ raise_exception('after the system message, user and assistant must take turns') }}{% endif %}"
)
LED = (
    "{% set led = messages | length > 0 and messages[0].role == 'system' %}"
    "{% set lead = messages[0].content + '\\n\\n' if led else '' %}{% set rest = messages[1:] if led else messages %}"
)
"""A system message that is prepended to the first user turn: `lead` is its text, `rest` the other messages."""
GEMMA = (
    LED
    + "{{ bos_token }}{% for m in rest %}"
    + ALTERNATE
    + "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else 'user') + '\\n' + (lead if loop.first else '') }}"
    + _assistant_text("m.content | trim + '<end_of_turn>'")
    + "{{ '\\n' }}{% endfor %}"
    + _generation_prompt("<start_of_turn>model\n")
)
MISTRAL = (
    LED
    + "{{ bos_token }}{% for m in rest %}"
    + ALTERNATE
    + "{% if m.role == 'user' %}{{ '[INST] ' + (lead if loop.first else '') + m.content + '[/INST]' }}{% endif %}"
    + "{% if m.role == 'assistant' %}{% generation %}{{ ' ' + m.content + eos_token }}{% endgeneration %}{% endif %}"
    + "{% endfor %}"
)
PHI = (
    "{% for m in messages %}{% if m.role not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('there is no role ' + m.role) }}{% endif %}{{ '<|' + m.role + '|>\\n' }}"
    + _assistant_text("m.content + '<|end|>'")
    + "{{ '\\n' }}{% endfor %}{% if not add_generation_prompt and eos_token != '<|end|>' %}{{ eos_token }}{% endif %}"
    + _generation_prompt("<|assistant|>\n")
)
QWEN_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
QWEN_TOOLS = (
    "\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with "
    "function signatures within <tools></tools> XML tags:\n<tools>"
)
QWEN_CALLS = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)
QWEN = (
    LED + f"{{{{ '<|im_start|>system\\n' + (messages[0].content if led else {QWEN_SYSTEM!r}) }}}}"
    f"{{% if tools %}}{{{{ {QWEN_TOOLS!r} }}}}{{% for tool in tools %}}{{{{ '\\n' + tool | tojson }}}}{{% endfor %}}"
    f"{{{{ {QWEN_CALLS!r} }}}}{{% endif %}}{{{{ '<|im_end|>\\n' }}}}"
    "{% for m in rest %}{% if m.role == 'tool' %}"
    "{% if loop.previtem is not defined or loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}"
    "{% if loop.nextitem is not defined or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}"
    "{% elif m.role == 'assistant' %}{{ '<|im_start|>assistant\\n' }}{% generation %}"
    "{% set said = m.content or '' %}{{ said }}{% for call in m.tool_calls or [] %}"
    "{{ ('\\n' if said or not loop.first else '') + '<tool_call>\\n{\"name\": \"' + call.function.name }}"
    "{{ '\", \"arguments\": ' + call.function.arguments | tojson + '}\\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    + _generation_prompt("<|im_start|>assistant\n")
)

BUILT_IN = {
    "chatml": BuiltIn(CHATML, ("<|im_start|>", "<|im_end|>"), "<|im_end|>"),
    "zephyr": BuiltIn(ZEPHYR, ("<|system|>", "<|user|>", "<|assistant|>", "</s>"), "</s>"),
    "llama3": BuiltIn(LLAMA3, ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), "<|eot_id|>"),
    "gemma": BuiltIn(GEMMA, ("<start_of_turn>", "<end_of_turn>"), "<end_of_turn>"),
    "mistral": BuiltIn(MISTRAL, ("[INST]", "[/INST]"), None),
    "qwen": BuiltIn(QWEN, ("<|im_start|>", "<|im_end|>"), "<|im_end|>"),
    "phi": BuiltIn(PHI, ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"), "<|end|>"),
}


def built_in_name(template: str) -> str | None:
    """The name of a built-in template; None for any other template."""
    return next((name for name, built_in in BUILT_IN.items() if built_in.text == template), None)
