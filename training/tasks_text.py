"""Tasks that copy or lightly edit a given text."""

from __future__ import annotations

import random

from training import lexicon as lx
from training import stories
from training.functions import FUNCTIONS
from training.requests import GLUES, Task, any_sentence, code_name, indent, say, with_text


def _any_text(r: random.Random) -> str:
    roll = r.random()
    if roll < 0.78:
        return " ".join(any_sentence(r) for _ in range(r.choice((1, 1, 1, 1, 2, 3))))
    if roll < 0.8:
        return " ".join(r.choice(lx.UNICODE_BITS) for _ in range(r.randint(1, 4)))
    if roll < 0.87:
        glue = r.choice((" ", ", "))
        return glue.join(str(r.randint(0, 10 ** r.randint(1, 5))) for _ in range(r.randint(1, 7)))
    if roll < 0.89:
        letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_"
        return "".join(r.choice(letters) for _ in range(r.randint(3, 16)))
    if roll < 0.96:
        return "\n".join(any_sentence(r) for _ in range(r.randint(2, 4)))
    _, _, args, body = r.choice(FUNCTIONS)
    return f"def {code_name(r)}({args}):\n{indent(body)}"


def copy(r: random.Random) -> Task:
    """Copy the given text exactly."""
    text = _any_text(r)
    request = with_text(
        r,
        [
            "Copy this text exactly.",
            "Repeat this.",
            "Repeat after me.",
            "Repeat exactly.",
            "Copy.",
            "Say exactly this.",
            "Repeat the following text.",
            "Write this again.",
            "Echo this.",
            "Copy the following text word for word.",
            "Say.",
            "Repeat this text without changes.",
            "Return the text below unchanged.",
            "Copy this text.",
            "Copy this.",
            "Copy the following.",
            "Copy the text.",
            "Copy this sentence.",
            "Copy exactly.",
            "Repeat.",
            "Repeat the sentence.",
            "Repeat this sentence.",
            "Repeat these words.",
            "Repeat this text.",
            "Repeat what I say.",
            "Say this.",
            "Say the following.",
            "Say these words.",
            "Write this.",
            "Write the following text.",
            "Write exactly this.",
            "Print this.",
            "Print.",
            "Echo.",
            "Type this.",
            "Output this text.",
            "Return this text.",
            "Give me this text back.",
            "Reply with exactly this.",
            "Answer with this text.",
        ],
        text,
    )
    return Task("copy", [(request, text)], exact=True)


def edit(r: random.Random) -> Task:
    """A light edit of the given text."""
    kind = r.choice(
        (
            "replace",
            "replace",
            "replace",
            "replace",
            "upper",
            "append",
            "prepend",
            "rename",
            "remove",
            "remove",
            "bullet",
            "first",
            "last",
        )
    )
    if kind == "upper":
        text = " ".join(r.choice(lx.ALL_WORDS) for _ in range(r.randint(1, 6)))
        requests = [
            "Write this in upper case.",
            "Make this upper case.",
            "Convert to uppercase.",
            "Use capital letters.",
            "Write this in capital letters.",
            "Uppercase this.",
            "Make this text uppercase.",
        ]
        return Task("edit_case", [(with_text(r, requests, text), text.upper())], exact=True)
    if kind in ("bullet", "first", "last"):
        words = r.sample(lx.ANY_WORDS, r.randint(2, 7))
        text = ", ".join(words)
        requests, answer = {
            "bullet": (
                [
                    "Turn this into a bulleted list.",
                    "Make bullet points of this.",
                    "Write as bullet points.",
                    "Make a bulleted list of this.",
                    "Write this as a list.",
                    "Turn this into a list.",
                ],
                "\n".join(f"- {w}" for w in words),
            ),
            "first": (["What is the first word of this list?", "Give me the first item."], words[0]),
            "last": (["What is the last word of this list?", "Give me the last item."], words[-1]),
        }[kind]
        return Task("edit_list", [(with_text(r, requests, text).replace("?:", "?"), answer)], exact=True)
    if kind == "rename":
        _, name, args, body = r.choice(FUNCTIONS)
        new = code_name(r)
        text = f"def {name}({args}):\n{indent(body)}"
        request = say(
            r,
            [
                "Rename the function {a} to {b}.",
                "Rename {a} to {b}.",
                "Change the name of the function {a} to {b}.",
            ],
            a=name,
            b=new,
        ).rstrip(".!")
        return Task(
            "edit_rename", [(f"{request}:\n\n{text}", f"def {new}({args}):\n{indent(body)}")], exact=True
        )
    sentence = " ".join(any_sentence(r) for _ in range(r.choice((1, 1, 2))))
    if kind in ("append", "prepend"):
        line = any_sentence(r)
        where, answer = (
            ("end", f"{sentence}\n{line}") if kind == "append" else ("beginning", f"{line}\n{sentence}")
        )
        request = say(
            r,
            [
                f'Add the line "{{l}}" at the {where} of this text.',
                f'Add "{{l}}" at the {where}.',
                f'Put "{{l}}" at the {where} of the text.',
            ],
            l=line,
        ).rstrip(".!")
        return Task("edit_add", [(f"{request}:\n{sentence}", answer)], exact=True)
    words = [w for w in dict.fromkeys(sentence.replace(".", " ").replace(",", " ").split()) if len(w) > 2]
    old = r.choice(words or ["the"])
    if kind == "remove":
        tokens = sentence.split(" ")
        answer = " ".join(t for t in tokens if t.strip(".,") != old)
        request = say(
            r,
            [
                'Remove the word "{a}".',
                "Remove the word {a} from this text.",
                "Delete the word {a}.",
                "Remove {a}.",
            ],
            a=old,
        )
        return Task(
            "edit_remove",
            [(f"{request.rstrip('.!')}{r.choice(GLUES).replace('{}', sentence, 1)}", answer)],
            exact=True,
        )
    new = stories.pick_name(r)[0] if old[0].isupper() else r.choice(lx.ANY_WORDS)
    request = say(
        r,
        [
            'Replace "{a}" with "{b}".',
            "Replace {a} with {b}.",
            "Replace the word {a} by {b}.",
            "Change {a} to {b}.",
            "Replace every {a} with {b} in this text.",
            "Swap {a} for {b}.",
            'Replace "{a}" by "{b}" in this sentence.',
            "Replace {a} with {b} in this sentence.",
            "In this text, replace {a} with {b}.",
            "Change the word {a} to {b}.",
            'Change "{a}" to "{b}".',
            "Use {b} instead of {a}.",
        ],
        a=old,
        b=new,
    ).rstrip(".!")
    answer = " ".join(t.replace(old, new) if t.strip(".,") == old else t for t in sentence.split(" "))
    return Task(
        "edit_replace", [(f"{request}{r.choice(GLUES).replace('{}', sentence, 1)}", answer)], exact=True
    )
