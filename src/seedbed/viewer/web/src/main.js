// Starts the page for what it carries: a replay of episodes, or robots that move by themselves.
import * as play from "./play.js";
import * as replay from "./replay.js";

const carried = (id) => JSON.parse(document.getElementById(id)?.textContent ?? "null");
const episodes = carried("replay");
if (episodes) replay.start(episodes);
else play.start(carried("robots"));
