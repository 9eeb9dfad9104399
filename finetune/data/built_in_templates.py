"""The chat templates that --chat_template knows by name.

They are for tokenizers without a template, or with one that cannot render the rows. Templates with turns that end in
eos_token work with any tokenizer; the others need a base model with their tokens in its vocabulary.
"""

# Assistant turns end with the tokenizer's EOS token: without a chat template, <|im_end|> is rarely in the vocabulary.
CHATML_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] }}"
    "{{ (eos_token if message['role'] == 'assistant' and eos_token else '<|im_end|>') + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}"
    "{{ message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% set told = messages[0]['content'] + '\\n\\n' if messages[0]['role'] == 'system' else '' %}"
    "{% for message in (messages[1:] if told else messages) %}"
    "{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\\n' }}"
    "{{ (told if loop.first else '') + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% set told = messages[0]['content'] + '\\n\\n' if messages[0]['role'] == 'system' else '' %}"
    "{% for message in (messages[1:] if told else messages) %}{% if message['role'] == 'assistant' %}"
    "{{ ' ' + message['content'] + eos_token }}{% else %}"
    "{{ '[INST] ' + (told if loop.first else '') + message['content'] + ' [/INST]' }}{% endif %}{% endfor %}"
)
ZEPHYR = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\\n' + message['content'] + eos_token + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
VICUNA = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{{ 'ASSISTANT: ' + message['content'] + "
    "eos_token + '\\n' }}{% elif message['role'] == 'system' %}{{ message['content'] + '\\n\\n' }}{% else %}"
    "{{ 'USER: ' + message['content'] + '\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
ALPACA = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{{ '### Response:\\n' + message['content'] + "
    "eos_token + '\\n\\n' }}{% elif message['role'] == 'system' %}{{ message['content'] + '\\n\\n' }}{% else %}"
    "{{ '### Instruction:\\n' + message['content'] + '\\n\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### Response:\\n' }}{% endif %}"
)
BUILT_IN = {
    "chatml": CHATML_TEMPLATE,
    "llama3": LLAMA3,
    "gemma": GEMMA,
    "mistral": MISTRAL,
    "zephyr": ZEPHYR,
    "vicuna": VICUNA,
    "alpaca": ALPACA,
}
