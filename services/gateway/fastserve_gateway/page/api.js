// Calls to this gateway, with the key where it wants one. The key lives as long as the tab.

const KEY = "fastserve-api-key";

let ask = () => {};

export function onKeyWanted(callback) {
  ask = callback;
}

export function setKey(key) {
  sessionStorage.setItem(KEY, key);
}

export function hasKey() {
  return sessionStorage.getItem(KEY) !== null;
}

/** `fetch` with the key. A 401 asks for another one, and is given back like any other answer. */
export async function call(path, options = {}) {
  const headers = new Headers(options.headers);
  const key = sessionStorage.getItem(KEY);
  if (key) headers.set("Authorization", `Bearer ${key}`);
  const response = await fetch(path, { ...options, headers });
  if (response.status === 401) ask();
  return response;
}
