// Unpacks what seedbed.viewer packed; layouts are those of html._encode and surfaces.describe_surface.
import { BufferAttribute, BufferGeometry, Quaternion, Vector3 } from "three";

// Returns the bytes of base64 of gzip.
export async function unpack(data) {
  const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).arrayBuffer();
}

// Returns the geometry of a mesh or height field.
export async function unpackSurface({ points, faces, low, size, data }) {
  const buffer = await unpack(data);
  const place = new Uint16Array(buffer, 12 * faces, 3 * points);
  const normal = new Int8Array(buffer, 12 * faces + 6 * points, 3 * points);
  const position = Float32Array.from(place, (value, index) => low[index % 3] + (size[index % 3] * value) / 65535);
  const geometry = new BufferGeometry();
  geometry.setIndex(new BufferAttribute(new Uint32Array(buffer, 0, 3 * faces), 1));
  geometry.setAttribute("position", new BufferAttribute(position, 3));
  geometry.setAttribute("normal", new BufferAttribute(normal, 3, true));
  return geometry;
}

// Returns one episode with its sequences: positions [body][axis][frame], and so on.
export async function unpackEpisode(packed, bodies) {
  const buffer = await unpack(packed.data);
  const frames = packed.steps + 1;
  let offset = 0;
  const take = (Type, length) => {
    const values = new Type(buffer, offset, length);
    offset += values.byteLength;
    return values;
  };
  const series = (length) => take(Float32Array, length);
  const many = (count, make) => Array.from({ length: count }, make);
  const position = many(bodies, () => many(3, () => series(frames)));
  const target = many(3, () => series(frames));
  const reward = series(packed.steps);
  const extra = packed.series.map((name) => ({ name, values: series(packed.steps) }));
  const quaternion = many(bodies, () => many(4, () => take(Int16Array, frames)));
  return { frames, steps: packed.steps, dt: packed.env_dt, position, target, reward, extra, quaternion };
}

const first = new Quaternion();
const second = new Quaternion();

// Interpolates a body's pose at a frame that need not be whole.
export function poseAt(episode, body, time, position, quaternion) {
  interpolate(episode.position[body], time, position);
  const { frame, next, part } = neighbours(episode.frames, time);
  const [w, x, y, z] = episode.quaternion[body];
  first.set(x[frame], y[frame], z[frame], w[frame]).normalize();
  second.set(x[next], y[next], z[next], w[next]).normalize();
  quaternion.slerpQuaternions(first, second, part);
}

// Interpolates where a following camera looks.
export function targetAt(episode, time, out = new Vector3()) {
  return interpolate(episode.target, time, out);
}

function interpolate([x, y, z], time, out) {
  const { frame, next, part } = neighbours(x.length, time);
  const mix = (values) => values[frame] + (values[next] - values[frame]) * part;
  return out.set(mix(x), mix(y), mix(z));
}

function neighbours(frames, time) {
  const frame = Math.min(Math.floor(time), frames - 1);
  return { frame, next: Math.min(frame + 1, frames - 1), part: time - frame };
}
