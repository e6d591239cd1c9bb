// The id of a request, as lists show it.

export function RequestId({ id }: { id: string }) {
  return <code title={id}>{id}</code>;
}
