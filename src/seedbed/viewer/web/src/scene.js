// The scene: bodies from MuJoCo's geoms, ground, sky, light, and a camera that follows.
import {
  AmbientLight, BackSide, BoxGeometry, CanvasTexture, CapsuleGeometry, Color, CylinderGeometry,
  DirectionalLight, DoubleSide, Fog, FrontSide, Group, HemisphereLight, Mesh, MeshLambertMaterial,
  MeshStandardMaterial,
  PCFShadowMap, PerspectiveCamera, PlaneGeometry, Raycaster, RepeatWrapping, Scene, ShaderMaterial,
  SphereGeometry, SRGBColorSpace, Vector2, Vector3, WebGLRenderer,
} from "three";
import { OrbitControls } from "three/addons/controls/OrbitControls.js";

const FIELD_OF_VIEW = 40; // degrees, vertical
const GROUND_FROM = 5; // metres: a larger plane is the ground and has no edge
const LEVEL = 0.999; // cosine of a slope below which a plane is level
const TILES = 400; // of the ground, across
const TEXELS = 128; // of a tile, across

// What is shown is given as a frame: `pose(index, position, quaternion)` writes where a body is, and `target(out)`
// where a following camera looks.
export class Stage {
  constructor(canvas, described, surfaces) {
    this.described = described;
    this.radius = described.radius;
    this.lean = drawnByProcessor();
    this.finest = this.lean ? 0.7 : 2; // pixels of the picture for one of the page, at most
    this.renderer = new WebGLRenderer({ canvas, antialias: !this.lean });
    this.renderer.shadowMap.enabled = !this.lean;
    this.renderer.shadowMap.type = PCFShadowMap;
    this.scene = new Scene();
    this.camera = new PerspectiveCamera(FIELD_OF_VIEW, 1, this.radius * 0.02, this.radius * 300);
    this.camera.up.set(0, 0, 1);
    this.controls = new OrbitControls(this.camera, canvas);
    this.controls.enableDamping = true;
    this.controls.dampingFactor = 0.12;
    this.controls.minDistance = this.radius * 0.3;
    this.controls.maxDistance = this.radius * 30;
    this.following = described.follows;
    this.target = new Vector3();
    this.grounds = [];
    this.addSky();
    this.addLight();
    this.bodies = described.bodies.map(() => new Group());
    for (const body of this.bodies) this.scene.add(body);
    for (const geom of described.geoms) this.addGeom(geom, surfaces);
    if (this.grounds.length) this.controls.maxPolarAngle = 0.5 * Math.PI; // not from below the ground
  }

  addSky() {
    const uniforms = { top: { value: new Color() }, low: { value: new Color() } };
    this.sky = new Mesh(
      new SphereGeometry(this.radius * 280, 32, 24),
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
    this.scene.fog = new Fog(0, this.radius * 12, this.radius * 70);
  }

  addLight() {
    this.scene.add(new HemisphereLight(0xffffff, 0x8a8f98, 1.5), new AmbientLight(0xffffff, 0.25));
    this.sun = new DirectionalLight(0xfff6e8, 2.2);
    this.sun.castShadow = true;
    this.sun.shadow.mapSize.set(2048, 2048);
    this.sun.shadow.bias = -0.0004;
    this.sun.shadow.normalBias = this.radius * 0.004;
    this.sun.shadow.radius = 3;
    const reach = this.radius * 2.6;
    Object.assign(this.sun.shadow.camera, {
      left: -reach, right: reach, top: reach, bottom: -reach, near: 0.1 * reach, far: 8 * reach,
    });
    this.scene.add(this.sun, this.sun.target);
  }

  addGeom(geom, surfaces) {
    const [w, x, y, z] = geom.quaternion;
    const ground = geom.shape === "plane" && isGround(geom);
    const mesh = ground ? this.makeGround() : this.makeMesh(geom, surfaces[geom.surface]);
    mesh.position.set(...geom.position);
    mesh.quaternion.set(x, y, z, w);
    const body = this.described.bodies.indexOf(geom.body);
    (body < 0 ? this.scene : this.bodies[body]).add(mesh);
    if (!ground) return;
    this.grounds.push({ mesh, home: mesh.position.clone() });
    mesh.updateWorldMatrix(true, false);
    const { elements } = mesh.matrixWorld;
    if (elements[10] > LEVEL) this.level ??= elements[14];
  }

  makeMesh({ shape, size, rgba }, surface) {
    const [r, g, b, a] = rgba;
    const material = this.material({
      color: new Color().setRGB(r, g, b, SRGBColorSpace),
      transparent: a < 1, opacity: a, side: shape === "plane" ? DoubleSide : FrontSide,
    }, 0.55);
    const mesh = new Mesh(surface ?? makeGeometry(shape, size), material);
    mesh.castShadow = shape !== "plane";
    mesh.receiveShadow = true;
    return mesh;
  }

  material(given, roughness) {
    return this.lean ? new MeshLambertMaterial(given) : new MeshStandardMaterial({ ...given, roughness });
  }

  // Draws more coarsely from now on.
  ease() {
    if (this.renderer.shadowMap.enabled) {
      this.renderer.shadowMap.enabled = false;
      this.sun.castShadow = false;
    } else if (this.size) {
      this.finest = Math.max(0.4, 0.75 * Math.min(this.finest, window.devicePixelRatio));
      this.resize(...this.size);
    }
  }

  makeGround() {
    this.tile = tileSize(this.radius);
    this.texture ??= makeTexture(this.lean ? 1 : this.renderer.capabilities.getMaxAnisotropy());
    const side = TILES * this.tile;
    this.texture.repeat.set(TILES / 2, TILES / 2);
    // Tops of tiles that lie in the plane are before it.
    const behind = { polygonOffset: true, polygonOffsetFactor: 1, polygonOffsetUnits: 1 };
    const material = this.material({ map: this.texture, ...behind }, 0.9);
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
    this.size = [width, height];
    this.renderer.setPixelRatio(Math.min(window.devicePixelRatio, this.finest));
    this.renderer.setSize(width, height, false);
    this.camera.aspect = width / height;
    this.camera.updateProjectionMatrix();
  }

  // Puts the camera where the whole body is seen.
  resetView(frame) {
    const [azimuth, elevation] = [this.described.azimuth, this.described.elevation].map((degrees) => (degrees * Math.PI) / 180);
    const half = (FIELD_OF_VIEW * Math.PI) / 360;
    const across = Math.atan(Math.tan(half) * Math.min(1, this.camera.aspect));
    const distance = (1.2 * this.radius) / Math.sin(across);
    const level = Math.cos(elevation);
    const forward = new Vector3(level * Math.cos(azimuth), level * Math.sin(azimuth), Math.sin(elevation));
    frame.target(this.target);
    this.controls.target.copy(this.target);
    this.camera.position.copy(this.target).addScaledVector(forward, -distance);
    this.controls.update();
  }

  // Turns the camera to the body, from where it is.
  catchUp(frame) {
    frame.target(this.target);
    this.moveCamera(this.target.clone().sub(this.controls.target));
  }

  moveCamera(by) {
    this.controls.target.add(by);
    this.camera.position.add(by);
  }

  // Puts bodies, camera, light and ground where they are.
  show(frame) {
    this.bodies.forEach((body, index) => frame.pose(index, body.position, body.quaternion));
    const target = frame.target(new Vector3());
    if (this.following) this.moveCamera(target.clone().sub(this.target));
    this.target.copy(target);
    this.sun.target.position.copy(target);
    this.sun.position.copy(target).add(new Vector3(-0.9, -1.5, 2.6).multiplyScalar(this.radius * 2));
    for (const { mesh, home } of this.grounds) {
      // By whole tiles of the plane itself, which may be a slope or a wall.
      const period = 2 * this.tile;
      const place = mesh.parent.worldToLocal(this.controls.target.clone()).sub(home);
      place.applyQuaternion(mesh.quaternion.clone().invert()).divideScalar(period).round().setZ(0);
      mesh.position.copy(home).add(place.multiplyScalar(period).applyQuaternion(mesh.quaternion));
    }
  }

  // Returns the body under the cursor: its index and the point that was hit; null if there is none.
  hit(event) {
    this.aim(event);
    const [first] = this.caster.intersectObjects(this.bodies, true);
    if (!first) return null;
    const index = this.bodies.findIndex((body) => body === first.object.parent);
    this.depth = first.distance * this.caster.ray.direction.dot(this.camera.getWorldDirection(new Vector3()));
    return { index, point: first.point };
  }

  // Writes where the cursor is, as deep in the picture as the last hit.
  along(event, out) {
    this.aim(event);
    const { origin, direction } = this.caster.ray;
    const cosine = direction.dot(this.camera.getWorldDirection(new Vector3()));
    return out.copy(origin).addScaledVector(direction, this.depth / cosine);
  }

  aim(event) {
    const box = this.renderer.domElement.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * 2 - 1;
    const y = 1 - ((event.clientY - box.top) / box.height) * 2;
    this.caster ??= new Raycaster();
    this.caster.setFromCamera(new Vector2(x, y), this.camera);
  }

  // Draws if something has changed or the camera still swings.
  draw(changed) {
    const moving = this.controls.update();
    if (!changed && !moving) return;
    this.sky.position.copy(this.camera.position);
    this.renderer.render(this.scene, this.camera);
  }
}

// Whether there is no graphics processor: then a picture costs much time.
function drawnByProcessor() {
  const context = document.createElement("canvas").getContext("webgl2");
  const name = context?.getExtension("WEBGL_debug_renderer_info")?.UNMASKED_RENDERER_WEBGL;
  const found = name ? context.getParameter(name) : "";
  context?.getExtension("WEBGL_lose_context")?.loseContext();
  return /swiftshader|llvmpipe|software|basic render/i.test(found);
}

const isGround = ({ size }) => size[0] === 0 || size[1] === 0 || Math.min(size[0], size[1]) > GROUND_FROM;

// The round number of metres nearest to the body's size.
function tileSize(radius) {
  const sizes = [0.05, 0.1, 0.25, 0.5, 1, 2, 5];
  return sizes.find((size) => size >= radius * 0.45) ?? sizes.at(-1);
}

function makeTexture(anisotropy) {
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = 2 * TEXELS;
  const texture = new CanvasTexture(canvas);
  texture.wrapS = texture.wrapT = RepeatWrapping;
  texture.colorSpace = SRGBColorSpace;
  texture.anisotropy = anisotropy;
  return texture;
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
