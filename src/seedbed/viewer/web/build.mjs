// Bundles src/ with three.js into replay.js, which every replay carries, and report/ with uPlot into
// report.js, which every report carries. The first line of each names the sources it was made of:
// tests/test_viewer_html.py compares.
import { createHash } from "node:crypto";
import { readFileSync, readdirSync } from "node:fs";
import { build } from "esbuild";

async function bundle(folder, library, name, outfile) {
  const sources = [...readdirSync(folder).sort().map((file) => `${folder}/${file}`), "package.json"];
  const digest = createHash("sha256");
  for (const source of sources) digest.update(readFileSync(source));
  const licence = readFileSync(`node_modules/${library}/LICENSE`, "utf8").trim();
  await build({
    entryPoints: [`${folder}/main.js`],
    outfile,
    bundle: true,
    minify: true,
    format: "iife",
    target: ["chrome110", "firefox113", "safari16.4"],
    charset: "utf8",
    legalComments: "none",
    loader: { ".css": "text" },
    banner: { js: `/* sources ${digest.digest("hex")} */\n/* ${name}\n\n${licence}\n*/` },
  });
}

await bundle("src", "three", "three.js", "replay.js");
await bundle("report", "uplot", "uPlot", "report.js");
