"""Several prompts through the engine in this process, with no server.

python examples/offline.py [MODEL]
"""

import sys

from headrace import LLM, SamplingParams

llm = LLM(sys.argv[1] if len(sys.argv) > 1 else "builtin", max_num_seqs=16)

prompts = ["Once upon a time", "There was once a fox", "One day, a queen"]
params = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=40, seed=1)
for output in llm.generate(prompts, params):
    answer = output.outputs[0]
    print(f"{output.prompt}{answer.text}  [{answer.finish_reason}, {len(answer.token_ids)} tokens]")

conversation = [{"role": "user", "content": "Tell me a story about Anna."}]
(output,) = llm.chat(conversation, params, n=2)  # two answers share the prompt's blocks
for answer in output.outputs:
    print(f"{answer.index + 1}: {answer.text}")
