"""Chat templates as their makers publish them, without the branches for tools."""

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


# The prompt for generation goes on where no answer of the past does.
GENERATES_OTHERWISE = CHATML.replace("'<|im_start|>assistant\\n'", "'<|im_start|>assistant\\n<think>\\n'")

QWEN25 = (
    "{%- if messages[0]['role'] == 'system' %}"
    "{{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}"
    "{%- else %}"
    "{{- '<|im_start|>system\\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant."
    "<|im_end|>\\n' }}"
    "{%- endif %}"
    "{%- for message in messages %}"
    '{%- if (message.role == "user") or (message.role == "system" and not loop.first) or '
    '(message.role == "assistant" and not message.tool_calls) %}'
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}"
    "{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

_MISTRAL = (
    "{{{{ bos_token }}}}{{% for message in messages %}}"
    "{{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}}"
    "{{{{ raise_exception('Conversation roles must alternate "
    "user/assistant/user/assistant/...') }}}}"
    "{{% endif %}}"
    "{{% if message['role'] == 'user' %}}{{{{ '[INST] ' + message['content'] + ' [/INST]' }}}}"
    "{{% elif message['role'] == 'assistant' %}}{{{{ {answer} }}}}"
    "{{% else %}}{{{{ raise_exception('Only user and assistant roles are supported!') }}}}"
    "{{% endif %}}{{% endfor %}}"
)
MISTRAL_V01 = _MISTRAL.format(answer="message['content'] + eos_token + ' '")
MISTRAL_V02 = _MISTRAL.format(answer="message['content'] + eos_token")

# The system text goes into the last user turn, and only when that turn is the last of all.
MISTRAL_V03 = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set ns = namespace() %}
{%- set ns.index = 0 %}
{%- for message in loop_messages %}
    {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
        {{- raise_exception("After the optional system message, roles must alternate") }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- endif %}
{%- endfor %}
"""

GEMMA3 = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set first_user_prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- if (message['role'] == 'assistant') -%}
        {%- set role = "model" -%}
    {%- else -%}
        {%- set role = message['role'] -%}
    {%- endif -%}
    {{ '<start_of_turn>' + role + '\\n' + (first_user_prefix if loop.first else "") }}
    {{- message['content'] | trim }}
    {{- '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{'<start_of_turn>model\\n'}}{%- endif -%}
"""

# No end-of-turn marker and no BOS.
ALPACA = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{{ message['content'] + '\\n\\n' }}{% else %}"
    "{{ '### Instruction:\\n' + message['content'] + '\\n\\n### Response:\\n' }}"
    "{% endif %}{% endfor %}"
)

# Qwen3's habit: an answer loses what is in <think> as soon as another turn follows.
REWRITES = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if loop.last and message['role'] == 'assistant' %}{{ '<think>\\n\\n</think>\\n\\n' }}"
    "{% endif %}{{ message['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# Phi-3: an end of the conversation, which begins like the next turn that another conversation has.
PHI3 = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ '<|endoftext|>' }}{% endif %}"
)

# The same texts as those above, with transformers' tags around what an assistant generates.
CHATML_TAGGED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
)
_MISTRAL_TAGGED = (
    "{{{{ bos_token }}}}{{% for message in messages %}}"
    "{{% if message['role'] == 'user' %}}{{{{ '[INST] ' + message['content'] + '{question_end}' }}}}"
    "{{% else %}}{{% generation %}}{{{{ {answer} + eos_token }}}}{{% endgeneration %}}{{{{ '{answer_end}' }}}}"
    "{{% endif %}}{{% endfor %}}"
)
MISTRAL_V01_TAGGED = _MISTRAL_TAGGED.format(question_end=" [/INST]", answer="message['content']", answer_end=" ")
MISTRAL_V02_TAGGED = _MISTRAL_TAGGED.format(question_end=" [/INST]", answer="message['content']", answer_end="")
MISTRAL_V03_TAGGED = _MISTRAL_TAGGED.format(
    question_end="[/INST]", answer="' ' + message['content'] | trim", answer_end=""
)
