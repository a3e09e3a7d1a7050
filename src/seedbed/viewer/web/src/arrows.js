// Arrows of velocities and forces.
import { ConeGeometry, CylinderGeometry, Group, Mesh, MeshStandardMaterial, Vector3 } from "three";

const UP = new Vector3(0, 1, 0);
const HEAD = 0.28; // of an arrow's length, at most

export class Arrow extends Group {
  // `width` is the radius of the shaft in m.
  constructor(colour, width) {
    super();
    const material = new MeshStandardMaterial({ color: colour, roughness: 0.5 });
    this.width = width;
    this.shaft = new Mesh(new CylinderGeometry(width, width, 1, 16).translate(0, 0.5, 0), material);
    this.head = new Mesh(new ConeGeometry(2.4 * width, 1, 20).translate(0, 0.5, 0), material);
    this.add(this.shaft, this.head);
    this.visible = false;
  }

  // Goes from `from` along `way`, which has the arrow's length in m.
  point(from, way) {
    const length = way.length();
    this.visible = length > 0.5 * this.width;
    if (!this.visible) return;
    const head = Math.min(HEAD * length, 7 * this.width);
    this.shaft.scale.y = length - head;
    this.head.scale.y = head;
    this.head.position.y = length - head;
    this.position.copy(from);
    this.quaternion.setFromUnitVectors(UP, way.clone().divideScalar(length));
  }
}
