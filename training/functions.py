"""Small Python functions: what they do, their name, their parameters and their body."""

from __future__ import annotations

FUNCTIONS: list[tuple[str, str, str, str]] = [
    ("adds two numbers", "add", "a, b", "return a + b"),
    ("subtracts two numbers", "subtract", "a, b", "return a - b"),
    ("multiplies two numbers", "multiply", "a, b", "return a * b"),
    ("divides two numbers", "divide", "a, b", "return a / b"),
    ("returns the larger of two numbers", "larger", "a, b", "return a if a > b else b"),
    ("returns the smaller of two numbers", "smaller", "a, b", "return a if a < b else b"),
    ("checks if a number is even", "is_even", "n", "return n % 2 == 0"),
    ("checks if a number is odd", "is_odd", "n", "return n % 2 == 1"),
    ("squares a number", "square", "n", "return n * n"),
    ("doubles a number", "double", "n", "return 2 * n"),
    ("reverses a string", "reverse", "text", "return text[::-1]"),
    ("counts the words in a text", "count_words", "text", "return len(text.split())"),
    ("checks if a word is a palindrome", "is_palindrome", "word", "return word == word[::-1]"),
    (
        "computes the factorial of a number",
        "factorial",
        "n",
        "result = 1\nfor i in range(2, n + 1):\n    result *= i\nreturn result",
    ),
    (
        "sums a list of numbers",
        "total",
        "numbers",
        "result = 0\nfor number in numbers:\n    result += number\nreturn result",
    ),
    ("computes the average of a list", "average", "numbers", "return sum(numbers) / len(numbers)"),
    (
        "finds the largest number in a list",
        "largest",
        "numbers",
        "best = numbers[0]\nfor number in numbers:\n    if number > best:\n        best = number\nreturn best",
    ),
    (
        "returns the first n Fibonacci numbers",
        "fibonacci",
        "n",
        "numbers = [0, 1]\nwhile len(numbers) < n:\n    numbers.append(numbers[-1] + numbers[-2])\nreturn numbers[:n]",
    ),
    ("greets a person", "greet", "name", 'return "Hello, " + name + "!"'),
    (
        "counts the vowels in a text",
        "count_vowels",
        "text",
        'count = 0\nfor letter in text:\n    if letter in "aeiou":\n        count += 1\nreturn count',
    ),
    (
        "checks if a number is prime",
        "is_prime",
        "n",
        "if n < 2:\n    return False\nfor i in range(2, n):\n    if n % i == 0:\n        return False\nreturn True",
    ),
    ("converts Celsius to Fahrenheit", "to_fahrenheit", "celsius", "return celsius * 9 / 5 + 32"),
    ("computes the area of a circle", "circle_area", "radius", "return 3.14159 * radius ** 2"),
    (
        "removes duplicates from a list",
        "unique",
        "items",
        "result = []\nfor item in items:\n    if item not in result:\n        result.append(item)\nreturn result",
    ),
    ("prints the numbers from 1 to n", "print_numbers", "n", "for i in range(1, n + 1):\n    print(i)"),
]
