// The address of a page: its name and parameters behind the `#`.

/** A parameter of an address, if it names one of the options. */
export const option = (options, name, otherwise) => (name !== undefined && Object.hasOwn(options, name) ? name : otherwise);

export function address(name, params = {}) {
  const query = new URLSearchParams(Object.entries(params).filter(([, value]) => value !== "" && value !== undefined));
  return `#/${name}${query.size ? `?${query}` : ""}`;
}
