// The replay page of a recording, in a frame of its own, which is filled once it comes into view.
const escaped = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" };

export function showWhenSeen(holder, replay) {
  const observer = new IntersectionObserver((entries) => {
    if (!entries.some((entry) => entry.isIntersecting)) return;
    observer.disconnect();
    const page = JSON.parse(document.getElementById("replay-page").textContent);
    const frame = document.createElement("iframe");
    frame.title = replay.title;
    frame.setAttribute("sandbox", "allow-scripts");
    const parts = {
      title: replay.title.replace(/[&<>"]/g, (letter) => escaped[letter]),
      // Only a `<` in the data could end the script element that contains it.
      data: JSON.stringify(replay).replaceAll("<", "\\u003c"),
    };
    frame.srcdoc = page.replace(/\{\{(title|data)\}\}/g, (_, name) => parts[name]);
    holder.replaceChildren(frame);
  }, { rootMargin: "200px" });
  observer.observe(holder);
}
