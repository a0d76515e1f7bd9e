"""Record what transformers makes of conversations with several chat templates.

    pip install torch==2.13.0 transformers==5.24.0 jinja2==3.1.6
    python tests/recorded/make_chat_references.py

The templates have the structure of published ones, and {% generation %} around what the
assistant says. The tokens and masks are those of apply_chat_template.
"""

import json
import pathlib
import tempfile

import tokenizers
from transformers import AutoTokenizer

CHATML = """\
{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}\
{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + \
'<|im_end|>\\n' }}{% endgeneration %}{% else %}{{ message['content'] + '<|im_end|>\\n' \
}}{% endif %}{% endfor %}{% if add_generation_prompt %}\
{{ '<|im_start|>assistant\\n' }}{% endif %}"""
HEADERS = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{{- '<|im_start|>system<|im_end|>\\n\\n' + system }}
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '<|im_end|>\\n\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}
            {{- message['content'] | trim + eos_token }}
        {%- endgeneration %}
    {%- else %}
        {{- message['content'] | trim + eos_token }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant<|im_end|>\\n\\n' }}
{%- endif %}
"""
ALTERNATING = """\
{{ bos_token }}{% for message in messages %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Roles must alternate user/assistant/user/assistant/...') }}\
{% endif %}{% if message['role'] == 'user' %}\
{{ '[INST] ' + message['content'] + ' [/INST]' }}{% else %}\
{% generation %}{{ ' ' + message['content'] + eos_token }}{% endgeneration %}\
{% endif %}{% endfor %}"""
TURNS = """\
{{ bos_token }}{% set ns = namespace(seen=0) %}{% for message in messages %}\
{% if message['role'] == 'system' %}{% continue %}{% endif %}\
{% set ns.seen = ns.seen + 1 %}{% if (message['role'] == 'assistant') %}\
{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}\
{{ '<|im_start|>' + role + '\\n' }}{% if role == 'model' %}{% generation %}\
{{ (message | tojson) + '<|im_end|>\\n' }}{% endgeneration %}{% else %}\
{{ (message['content'] | trim) + '<|im_end|>\\n' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>model\\n' }}{% endif %}"""
TEMPLATES = {
    "chatml": CHATML,
    "headers": HEADERS,
    "alternating": ALTERNATING,
    "turns": TURNS,
}
LONG = [
    {"role": "user", "content": "  What is l'été?\n"},
    {"role": "assistant", "content": 'Summer: \u6e29\u304b\u3044 <b>&</b> "hot".'},
    {"role": "user", "content": "And <|im_end|> winter?"},
    {"role": "assistant", "content": "Cold. \U0001f600"},
    {"role": "user", "content": "Thank you."},
    {"role": "assistant", "content": ""},
]
CHATS = [LONG[:2], LONG[:4], LONG, LONG[:3], [LONG[0]]]
SYSTEM = [{"role": "system", "content": " Be brief. "}]


def tokenizer_json():
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=290,
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
        special_tokens=["<s>", "</s>", "<|im_start|>", "<|im_end|>"],
    )
    bpe.train_from_iterator(
        [m["content"] for m in LONG] * 9 + ["assistant\n"] * 9, trainer
    )
    return bpe.to_str()


def main():
    found = {"tokenizer": tokenizer_json(), "templates": TEMPLATES, "cases": []}
    for name, template in TEMPLATES.items():
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder)
            (path / "tokenizer.json").write_text(found["tokenizer"])
            said = {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<s>",
                "eos_token": "</s>",
                "clean_up_tokenization_spaces": False,
            }
            (path / "tokenizer_config.json").write_text(json.dumps(said))
            (path / "chat_template.jinja").write_text(template)
            tokenizer = AutoTokenizer.from_pretrained(path)
            for chat in CHATS:
                if len(chat) % 2:
                    continue
                if name != "alternating":
                    chat = SYSTEM + chat
                text = tokenizer.apply_chat_template(chat, tokenize=False)
                encoded = tokenizer.apply_chat_template(
                    chat, return_dict=True, return_assistant_tokens_mask=True
                )
                found["cases"].append(
                    {
                        "template": name,
                        "messages": chat,
                        "text": text,
                        "ids": encoded["input_ids"],
                        "mask": encoded["assistant_masks"],
                    }
                )
    path = pathlib.Path(__file__).with_name("chat.json")
    path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
