// The theme: `light`, `dark`, or `auto`, that of the system. Read before the first paint; the only thing that is stored.
(() => {
  const NAME = "serve_app_theme";
  const THEMES = ["auto", "light", "dark"];

  function stored() {
    try {
      const theme = localStorage.getItem(NAME);
      return THEMES.includes(theme) ? theme : "auto";
    } catch {
      return "auto"; // storage is off: the theme holds for this page
    }
  }

  let theme = stored();
  const system = matchMedia("(prefers-color-scheme: dark)");

  function apply() {
    const dark = theme === "dark" || (theme === "auto" && system.matches);
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    document.dispatchEvent(new Event("theme"));
  }

  system.addEventListener("change", apply);
  globalThis.consoleTheme = {
    get name() {
      return theme;
    },
    next() {
      theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
      try {
        localStorage.setItem(NAME, theme);
      } catch {
        // storage is off: the theme holds for this page
      }
      apply();
      return theme;
    },
  };
  apply();
})();
