// The scene: bodies from MuJoCo's geoms, ground, sky, light, and a camera that follows.
import {
  AmbientLight, BackSide, BoxGeometry, CanvasTexture, CapsuleGeometry, Color, CylinderGeometry,
  DirectionalLight, DoubleSide, Fog, FrontSide, Group, HemisphereLight, Mesh, MeshStandardMaterial,
  PCFShadowMap, PerspectiveCamera, PlaneGeometry, RepeatWrapping, Scene, ShaderMaterial,
  SphereGeometry, SRGBColorSpace, Vector3, WebGLRenderer,
} from "three";
import { OrbitControls } from "three/addons/controls/OrbitControls.js";
import { poseAt, replay, targetAt } from "./data.js";

const FIELD_OF_VIEW = 40; // degrees, vertical
const GROUND_FROM = 5; // metres: a larger plane is the ground and has no edge
const TILES = 400; // of the ground, across
const TEXELS = 128; // of a tile, across

export class Stage {
  constructor(canvas, surfaces) {
    this.renderer = new WebGLRenderer({ canvas, antialias: true });
    this.renderer.shadowMap.enabled = true;
    this.renderer.shadowMap.type = PCFShadowMap;
    this.scene = new Scene();
    this.camera = new PerspectiveCamera(FIELD_OF_VIEW, 1, replay.radius * 0.02, replay.radius * 300);
    this.camera.up.set(0, 0, 1);
    this.controls = new OrbitControls(this.camera, canvas);
    this.controls.enableDamping = true;
    this.controls.dampingFactor = 0.12;
    this.controls.minDistance = replay.radius * 0.3;
    this.controls.maxDistance = replay.radius * 30;
    this.following = replay.follows;
    this.target = new Vector3();
    this.grounds = [];
    this.addSky();
    this.addLight();
    this.bodies = replay.bodies.map(() => new Group());
    for (const body of this.bodies) this.scene.add(body);
    for (const geom of replay.geoms) this.addGeom(geom, surfaces);
    if (this.grounds.length) this.controls.maxPolarAngle = 0.5 * Math.PI; // not from below the ground
  }

  addSky() {
    const uniforms = { top: { value: new Color() }, low: { value: new Color() } };
    this.sky = new Mesh(
      new SphereGeometry(replay.radius * 280, 32, 24),
      new ShaderMaterial({
        uniforms, side: BackSide, depthWrite: false, fog: false,
        vertexShader: `varying vec3 direction;
          void main() {
            direction = position;
            gl_Position = projectionMatrix * modelViewMatrix * vec4(position, 1.0);
          }`,
        fragmentShader: `uniform vec3 top; uniform vec3 low; varying vec3 direction;
          void main() {
            float height = normalize(direction).z;
            gl_FragColor = vec4(mix(low, top, smoothstep(0.0, 0.45, height)), 1.0);
            #include <colorspace_fragment>
          }`,
      }),
    );
    this.scene.add(this.sky);
    this.scene.fog = new Fog(0, replay.radius * 12, replay.radius * 70);
  }

  addLight() {
    this.scene.add(new HemisphereLight(0xffffff, 0x8a8f98, 1.5), new AmbientLight(0xffffff, 0.25));
    this.sun = new DirectionalLight(0xfff6e8, 2.2);
    this.sun.castShadow = true;
    this.sun.shadow.mapSize.set(2048, 2048);
    this.sun.shadow.bias = -0.0004;
    this.sun.shadow.normalBias = replay.radius * 0.004;
    this.sun.shadow.radius = 3;
    const reach = replay.radius * 2.6;
    Object.assign(this.sun.shadow.camera, {
      left: -reach, right: reach, top: reach, bottom: -reach, near: 0.1 * reach, far: 8 * reach,
    });
    this.scene.add(this.sun, this.sun.target);
  }

  addGeom(geom, surfaces) {
    const [w, x, y, z] = geom.quaternion;
    const ground = geom.shape === "plane" && isGround(geom);
    const mesh = ground ? this.makeGround() : makeMesh(geom, surfaces[geom.surface]);
    mesh.position.set(...geom.position);
    mesh.quaternion.set(x, y, z, w);
    const body = replay.bodies.indexOf(geom.body);
    (body < 0 ? this.scene : this.bodies[body]).add(mesh);
    if (ground) this.grounds.push({ mesh, home: mesh.position.clone() });
  }

  makeGround() {
    this.tile = tileSize(replay.radius);
    this.texture ??= makeTexture(this.renderer);
    const side = TILES * this.tile;
    this.texture.repeat.set(TILES / 2, TILES / 2);
    const material = new MeshStandardMaterial({ map: this.texture, roughness: 0.9 });
    const mesh = new Mesh(new PlaneGeometry(side, side), material);
    mesh.receiveShadow = true;
    return mesh;
  }

  // Takes the colours of the page's theme.
  paint(colour) {
    this.sky.material.uniforms.top.value.set(colour("--sky-top"));
    this.sky.material.uniforms.low.value.set(colour("--sky-low"));
    this.scene.fog.color.set(colour("--sky-low"));
    if (!this.texture) return;
    const context = this.texture.image.getContext("2d");
    context.fillStyle = colour("--tile-a");
    context.fillRect(0, 0, 2 * TEXELS, 2 * TEXELS);
    context.fillStyle = colour("--tile-b");
    context.fillRect(0, 0, TEXELS, TEXELS);
    context.fillRect(TEXELS, TEXELS, TEXELS, TEXELS);
    this.texture.needsUpdate = true;
  }

  resize(width, height) {
    this.renderer.setPixelRatio(Math.min(window.devicePixelRatio, 2));
    this.renderer.setSize(width, height, false);
    this.camera.aspect = width / height;
    this.camera.updateProjectionMatrix();
  }

  // Puts the camera where the whole body is seen.
  resetView(episode, time) {
    const [azimuth, elevation] = [replay.azimuth, replay.elevation].map((degrees) => (degrees * Math.PI) / 180);
    const half = (FIELD_OF_VIEW * Math.PI) / 360;
    const across = Math.atan(Math.tan(half) * Math.min(1, this.camera.aspect));
    const distance = (1.2 * replay.radius) / Math.sin(across);
    const level = Math.cos(elevation);
    const forward = new Vector3(level * Math.cos(azimuth), level * Math.sin(azimuth), Math.sin(elevation));
    targetAt(episode, time, this.target);
    this.controls.target.copy(this.target);
    this.camera.position.copy(this.target).addScaledVector(forward, -distance);
    this.controls.update();
  }

  // Turns the camera to the body, from where it is.
  catchUp(episode, time) {
    this.moveCamera(targetAt(episode, time).sub(this.controls.target));
    targetAt(episode, time, this.target);
  }

  moveCamera(by) {
    this.controls.target.add(by);
    this.camera.position.add(by);
  }

  // Puts bodies, camera, light and ground where they are at a frame that need not be whole.
  show(episode, time) {
    this.bodies.forEach((body, index) => poseAt(episode, index, time, body.position, body.quaternion));
    const target = targetAt(episode, time);
    if (this.following) this.moveCamera(target.clone().sub(this.target));
    this.target.copy(target);
    this.sun.target.position.copy(target);
    this.sun.position.copy(target).add(new Vector3(-0.9, -1.5, 2.6).multiplyScalar(replay.radius * 2));
    for (const { mesh, home } of this.grounds) {
      const period = 2 * this.tile;
      const offset = this.controls.target.clone().sub(home).divideScalar(period).round();
      mesh.position.copy(home);
      mesh.position.x += offset.x * period;
      mesh.position.y += offset.y * period;
    }
  }

  // Draws if something has changed or the camera still swings.
  draw(changed) {
    const moving = this.controls.update();
    if (!changed && !moving) return;
    this.sky.position.copy(this.camera.position);
    this.renderer.render(this.scene, this.camera);
  }
}

const isGround = ({ size }) => size[0] === 0 || size[1] === 0 || Math.min(size[0], size[1]) > GROUND_FROM;

// The round number of metres nearest to the body's size.
function tileSize(radius) {
  const sizes = [0.05, 0.1, 0.25, 0.5, 1, 2, 5];
  return sizes.find((size) => size >= radius * 0.45) ?? sizes.at(-1);
}

function makeTexture(renderer) {
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = 2 * TEXELS;
  const texture = new CanvasTexture(canvas);
  texture.wrapS = texture.wrapT = RepeatWrapping;
  texture.colorSpace = SRGBColorSpace;
  texture.anisotropy = renderer.capabilities.getMaxAnisotropy();
  return texture;
}

function makeMesh({ shape, size, rgba }, surface) {
  const [r, g, b, a] = rgba;
  const material = new MeshStandardMaterial({
    color: new Color().setRGB(r, g, b, SRGBColorSpace), roughness: 0.55,
    transparent: a < 1, opacity: a, side: shape === "plane" ? DoubleSide : FrontSide,
  });
  const mesh = new Mesh(surface ?? makeGeometry(shape, size), material);
  mesh.castShadow = shape !== "plane";
  mesh.receiveShadow = true;
  return mesh;
}

// MuJoCo's sizes are radii and half lengths; its capsules and cylinders lie along z, three's along y.
function makeGeometry(shape, [x, y, z]) {
  switch (shape) {
    case "plane": return new PlaneGeometry(2 * x, 2 * y);
    case "sphere": return new SphereGeometry(x, 40, 28);
    case "ellipsoid": return new SphereGeometry(1, 40, 28).scale(x, y, z);
    case "capsule": return new CapsuleGeometry(x, 2 * y, 14, 32).rotateX(Math.PI / 2);
    case "cylinder": return new CylinderGeometry(x, x, 2 * y, 40).rotateX(Math.PI / 2);
    case "box": return new BoxGeometry(2 * x, 2 * y, 2 * z);
    default: throw new Error(`cannot draw a ${shape}`);
  }
}
