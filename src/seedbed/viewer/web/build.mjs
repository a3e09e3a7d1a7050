// Bundles src/ and three.js into replay.js, which every replay carries. Its first line names the
// sources it was made of: tests/test_viewer_html.py compares.
import { createHash } from "node:crypto";
import { readFileSync, readdirSync } from "node:fs";
import { build } from "esbuild";

const sources = [...readdirSync("src").sort().map((name) => `src/${name}`), "package.json"];
const digest = createHash("sha256");
for (const name of sources) digest.update(readFileSync(name));
const licence = readFileSync("node_modules/three/LICENSE", "utf8").trim();

await build({
  entryPoints: ["src/main.js"],
  outfile: "replay.js",
  bundle: true,
  minify: true,
  format: "iife",
  target: ["chrome110", "firefox113", "safari16.4"],
  charset: "utf8",
  legalComments: "none",
  banner: { js: `/* sources ${digest.digest("hex")} */\n/* three.js\n\n${licence}\n*/` },
});
