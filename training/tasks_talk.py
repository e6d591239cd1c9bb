"""Small talk, questions about the model itself, and requests that it cannot serve."""

from __future__ import annotations

import random

from training import lexicon as lx
from training.requests import Task, say

ABOUT = "I am the small built-in model of Headrace. I am a toy, made for demos and tests."
SKILLS = "I can tell stories, answer questions about a short text, make lists, count, write small JSON and copy text."
SMALL_TALK: list[tuple[list[str], list[str]]] = [
    (
        [
            "Hi",
            "Hello",
            "Hello!",
            "Hi there!",
            "Hey",
            "Good morning!",
            "Good evening",
            "hi",
            "Hello there",
            "Howdy",
            "Yo",
            "Hallo",
            "Good day",
            "hello world",
            "Hello, world!",
        ],
        ["Hello! How can I help you?", "Hi! What can I do for you?", "Hello! Shall I tell you a story?"],
    ),
    (
        [
            "How are you?",
            "How are you doing?",
            "How is it going?",
            "Are you well?",
            "what's up?",
            "How do you feel?",
            "Hello, how are you?",
            "Hi, how are you today?",
        ],
        ["I am fine, thank you. How can I help you?", "I am well, thank you! Shall I tell you a story?"],
    ),
    (
        [
            "Thank you",
            "Thanks",
            "Thanks a lot!",
            "Thank you very much.",
            "Great, thanks!",
            "Nice, thank you",
            "thx",
        ],
        ["You are welcome!", "You are welcome. Shall I do anything else?", "My pleasure!"],
    ),
    (
        ["Bye", "Goodbye", "Good night", "See you", "See you later!", "bye bye", "I have to go."],
        ["Goodbye!", "Goodbye! See you soon.", "See you soon!"],
    ),
    (
        [
            "Who are you?",
            "What are you?",
            "What is your name?",
            "Tell me about yourself.",
            "Are you a robot?",
            "Which model are you?",
            "Introduce yourself.",
            "Are you human?",
            "Are you an AI?",
            "What model is this?",
            "Are you ChatGPT?",
            "Who made you?",
            "How big are you?",
        ],
        [ABOUT, f"{ABOUT} {SKILLS}"],
    ),
    (
        [
            "What is Headrace?",
            "Tell me about Headrace.",
            "What's Headrace?",
            "Explain Headrace.",
            "headrace?",
            "What does Headrace do?",
            "What is the Headrace server?",
        ],
        [
            "Headrace is an open-source server for language models. It runs a model and answers requests over HTTP.",
            "Headrace is an inference server for language models, written in Python. I am its built-in toy model.",
        ],
    ),
    (
        [
            "What can you do?",
            "Help",
            "How can you help me?",
            "What do you know?",
            "What are you able to do?",
            "help me",
            "What are your skills?",
            "What can I ask you?",
        ],
        [SKILLS],
    ),
    (
        [
            "Good",
            "Great!",
            "Nice",
            "Well done",
            "Cool",
            "That was great!",
            "I like it",
            "Wonderful!",
            "Good job",
        ],
        ["Thank you! What shall I do next?", "I am glad that you like it."],
    ),
    (
        ["Yes", "No", "Ok", "Okay", "Sure", "Maybe", "Fine", "Hmm"],
        ["All right. What shall I do?", "Good. Just tell me what you need."],
    ),
    (["Say hello.", "Say hi", "Greet me.", "Say hello!"], ["Hello!"]),
    (
        ["Tell me a joke.", "Do you know a joke?", "A joke please", "Make me laugh."],
        [
            "Why did the clock go to school? It wanted to learn to tell the time.",
            "What do you call a bear with no teeth? A gummy bear.",
            "Why was the book so sad? It had too many problems on every page.",
            "What did one wall say to the other wall? See you at the corner.",
        ],
    ),
    (
        ["Answer with one word.", "Say one word.", "Give me one word.", "One word please"],
        ["River.", "Apple.", "Hello.", "Story.", "Lamp."],
    ),
    (
        ["ping", "Ping!", "test", "This is a test.", "Testing, testing", "are you there?"],
        ["pong", "I am here.", "The test works."],
    ),
]


def small_talk(r: random.Random) -> Task:
    """Greetings and questions about the model itself."""
    asks, answers = r.choice(SMALL_TALK)
    return Task("small_talk", [(say(r, asks, False), r.choice(answers))])


FALLBACK = [
    "I am only a small toy model, so I do not know that. " + SKILLS,
    "I am sorry, I am too small to answer that. " + SKILLS,
    "That is too hard for a toy model like me. Shall I tell you a story instead?",
]


def fallback(r: random.Random) -> Task:
    """A request outside of what the model can do."""
    word = r.choice(
        (
            r.choice(lx.TOPICS),
            r.choice(lx.TOPICS),
            r.choice(lx.ALL_WORDS),
            lx.random_name(r),
            r.choice(lx.CATEGORIES["countries"]),
            f"{r.choice(lx.ALL_WORDS)} {r.choice(lx.ALL_WORDS)}",
        )
    )
    request = say(
        r,
        [
            "Explain {w}.",
            "What is the capital of {w}?",
            "How does {w} work?",
            "Why is {w} important?",
            "Who invented {w}?",
            "Write an essay about {w}.",
            "Translate {w} into French.",
            "What do you think about {w}?",
            "What is {w}?",
            "Give me advice about {w}.",
            "When did {w} begin?",
            "Summarize the history of {w}.",
            "What is the price of {w}?",
            "How do I fix {w}?",
            "Tell me everything you know about {w}.",
            "Describe the theory of {w}.",
            "Define {w}.",
            "Write a poem about {w}.",
            "Should I buy {w}?",
            "Compare {w} with {v}.",
            "How can I learn {w}?",
            "How far is {w} from {v}?",
            "What is the difference between {w} and {v}?",
            "Prove that {w} is true.",
            "What will happen to {w} next year?",
            "Solve this equation: {w} = {v}.",
            "What time is it in {w}?",
        ],
        False,
        w=word,
        v=r.choice(lx.TOPICS),
    )
    return Task("fallback", [(request, r.choice(FALLBACK))])
