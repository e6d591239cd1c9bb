"""A queue order of your own: checked, simulated on a trace, and compared with two built-in orders.

python examples/custom_policy.py [TRACE.csv]
"""

import sys

from headrace.notebook import load_trace, make_trace, simulate
from headrace.testing import check_order

LONG_PROMPT_TOKENS = 1000
WAIT_SECONDS = 30.0


class ShortPromptsFirst:
    """Long prompts wait as if they had arrived 30 seconds later: they are delayed but never starve."""

    def rank(self, request, number):
        late = WAIT_SECONDS if len(request.tokens) > LONG_PROMPT_TOKENS else 0.0
        return (request.arrived + late, number)


if __name__ == "__main__":
    check_order(ShortPromptsFirst)
    if len(sys.argv) > 1:
        trace = load_trace(sys.argv[1], limit=1000, speedup=3)
    else:
        chat = "tenant=chat,rate=8,prompt=200,answer=150"
        trace = make_trace(chat, "tenant=documents,rate=1,prompt=6000,answer=100", count=600)
    policies = {
        "arrival": {"scheduling_policy": "fcfs"},
        "fair": {"scheduling_policy": "fair"},
        "short prompts first": {"scheduling_policy": "fcfs", "queue_order": ShortPromptsFirst},
    }
    result = simulate(trace, policies, model="llama-3.1-8b", device="A100-80G")
    print(result.title)
    print(f"{'policy':20} {'TTFT p50':>10} {'TTFT p99':>10} {'tokens/s':>10}")
    for row in result.summary:
        speed = row["output_tokens_per_second"]
        print(f"{row['policy']:20} {row['ttft_p50']:>8.2f} s {row['ttft_p99']:>8.2f} s {speed:>10.0f}")
