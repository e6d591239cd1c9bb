"""Decode steps as graphs: all launches of a step are recorded once, and one launch replays them.

```
 StepPlan -> one array of the host -> one copy -> persistent buffers of the device
                                                    | replay of the graph of the next larger size
                     StepOutput <- one copy, event <- drawn tokens, which are also the next step's input
```
A graph computes lines of one token each. A row that decodes is one line, and a row with drafts one line for each token
that it draws. Steps that a graph cannot compute (prompts, scores) are launched operation by operation.

- `steps`: records graphs at start-up, and replays the one that fits a step.
- `plan`: which graphs a model records, and their memory.
- `body`: the work that a graph records.
- `buffers`: the inputs and outputs of graphs, on both sides.
- `sizes`: the numbers of lines for which there are graphs.
- `others`: what no graph computes, run once so that its kernels are compiled.
- `recorder`: what this needs of a device, and CUDA as that device.
"""
