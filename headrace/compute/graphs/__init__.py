"""CUDA graphs of decode steps: all launches of a step are recorded once, and one launch replays them.

```
 StepPlan -> one array of the host -> one copy -> persistent buffers of the device
                                                    | replay of the graph of the next larger size
                     StepOutput <- one copy, event <- drawn tokens, which are also the next step's input
```
A graph computes lines of one token each. A decode row is one line; a row with drafts has one line per sampled token.
Steps that a graph cannot compute (long prompts, scores) are launched operation by operation.

- `steps`: which graphs a model records, and their memory; records them at start-up, and replays the one that
  fits a step.
- `body`: the work that a graph records; it also compiles the kernels of steps without a graph.
- `buffers`: the inputs and outputs of graphs, on host and device, and the device as graphs see it.
"""
