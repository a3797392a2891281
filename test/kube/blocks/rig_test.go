//go:build system

package blocks

import (
	"bytes"
	"encoding/base64"
	"fmt"
	"os"
	"os/exec"
	"testing"

	"google.golang.org/grpc"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/kube/cluster"
	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/csivolume"
	"github.com/crust-proxy/crust-proxy/test/rig/snapshots"
	"github.com/crust-proxy/crust-proxy/test/snapmeta"
)

func TestMain(m *testing.M) { os.Exit(rig.Main(m)) }

const (
	mib    = int64(1) << 20
	driver = "crust.example.com"
	// name is the service's in the cluster, by which it cannot be reached from here.
	name     = "blocks.storage.svc"
	audience = "blocks.storage"
)

// fixture is a volume with snapshots, which the API server knows.
type fixture struct {
	*cluster.ControlPlane
	t         *testing.T
	data      string
	socket    string
	server    *snapmeta.Server
	address   string
	authority []byte
	volume    *csivolume.Volume
}

func newFixture(t *testing.T) *fixture {
	t.Helper()
	rig.Need(t, "mkfs.xfs")
	f := &fixture{ControlPlane: cluster.StartControlPlane(t), t: t, data: rig.Pool(t, "xfs", rig.Disk(t, 2<<30, "xfs"))}
	conn := f.startDriver()
	f.volume = csivolume.NewClient(conn, driver, t.TempDir()).Create(t, "v", "", 64*mib)
	f.server = &snapmeta.Server{Client: f.Client, Driver: driver, CSI: conn, Audience: audience}
	f.address, f.authority = f.server.Start(t, name)
	f.define()
	return f
}

func (f *fixture) startDriver() *grpc.ClientConn {
	f.t.Helper()
	dir := check.Value(os.MkdirTemp("", rig.Prefix("kb")))(f.t)
	f.socket = dir + "/csi.sock"
	f.t.Cleanup(func() { _ = os.RemoveAll(dir) })
	process, conn := rig.NewDriver(f.t, rig.Program(f.t, "crust-driver"), f.socket, f.data, "--node-id", "node-a", "--driver-name", driver)
	check.Must(f.t, process.Start())
	return conn
}

// types are the least that the API server has to know of the types of others.
const types = `apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata:
  name: %[3]s.%[1]s
  annotations: {api-approved.kubernetes.io: unapproved}
spec:
  group: %[1]s
  scope: %[5]s
  names: {kind: %[4]s, plural: %[3]s}
  versions:
    - name: %[2]s
      served: true
      storage: true
      schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}
---
`

// define makes the types, the service's object, and the backup client of the examples.
func (f *fixture) define() {
	f.t.Helper()
	check.Must(f.t, f.Apply(fmt.Sprintf(types, "snapshot.storage.k8s.io", "v1", "volumesnapshots", "VolumeSnapshot", "Namespaced")+
		fmt.Sprintf(types, "snapshot.storage.k8s.io", "v1", "volumesnapshotcontents", "VolumeSnapshotContent", "Cluster")+
		fmt.Sprintf(types, "cbt.storage.k8s.io", "v1beta1", "snapshotmetadataservices", "SnapshotMetadataService", "Cluster")))
	check.Must(f.t, check.Err(f.Kubectl("wait", "--for=condition=Established", "--timeout=60s", "crd", "--all")))
	client := check.Value(os.ReadFile("../../../deploy/kustomize/examples/changed-blocks/client.yaml"))(f.t)
	check.Must(f.t, f.Apply(`{apiVersion: v1, kind: Namespace, metadata: {name: backup}}
---
{apiVersion: v1, kind: Namespace, metadata: {name: shop}}
---
{apiVersion: v1, kind: ServiceAccount, metadata: {name: stranger, namespace: backup}}
---
`+string(client)))
	f.service(driver, name+":6443", audience)
}

// service makes the object by which clients find a driver's service.
func (f *fixture) service(driver, address, audience string) {
	f.t.Helper()
	check.Must(f.t, f.Apply(fmt.Sprintf(`{apiVersion: cbt.storage.k8s.io/v1beta1, kind: SnapshotMetadataService, metadata: {name: %s},
spec: {audience: %s, address: "%s", caCert: %s}}`, driver, audience, address, base64.StdEncoding.EncodeToString(f.authority))))
}

// image is the file of a volume or a snapshot.
func (f *fixture) image(id string) string { return snapshots.Image(f.data, id) }

// write fills MiBs of the volume.
func (f *fixture) write(fill byte, at ...int64) {
	f.t.Helper()
	file := check.Value(os.OpenFile(f.image(f.volume.ID), os.O_WRONLY, 0))(f.t)
	defer func() { _ = file.Close() }()
	for _, one := range at {
		check.Must(f.t, check.Err(file.WriteAt(bytes.Repeat([]byte{fill}, int(mib)), one*mib)))
	}
}

// snapshot makes one, with its object, and gives CSI's id.
func (f *fixture) snapshot(name string) string {
	f.t.Helper()
	id := check.Value(f.volume.Snapshot(name))(f.t)
	f.object(name, driver, id, true)
	return id
}

// object makes a VolumeSnapshot as the snapshot controller would leave it.
func (f *fixture) object(name, driver, handle string, ready bool) {
	f.t.Helper()
	check.Must(f.t, f.Apply(fmt.Sprintf(`{apiVersion: snapshot.storage.k8s.io/v1, kind: VolumeSnapshotContent, metadata: {name: content-%[1]s},
spec: {driver: %[2]s}, status: {snapshotHandle: "%[3]s"}}
---
{apiVersion: snapshot.storage.k8s.io/v1, kind: VolumeSnapshot, metadata: {name: %[1]s, namespace: shop},
status: {boundVolumeSnapshotContentName: content-%[1]s, readyToUse: %[4]v}}`, name, driver, handle, ready)))
}

// run runs crust-backup, and never shows a token.
func (f *fixture) run(args ...string) (string, error) {
	f.t.Helper()
	out, err := exec.Command(rig.Program(f.t, "crust-backup"), args...).CombinedOutput()
	for _, token := range f.server.Tokens() {
		check.That(f.t, !bytes.Contains(out, []byte(token)), "crust-backup %v shows a token: %s", args, out)
	}
	return string(out), err
}

func (f *fixture) must(args ...string) string {
	f.t.Helper()
	out, err := f.run(args...)
	check.Require(f.t, err == nil, "crust-backup %v: %v\n%s", args, err, out)
	return out
}

// client are the flags of the backup client of the examples.
func (f *fixture) client() []string {
	return []string{
		"--kubeconfig", f.Kubeconfig("system:serviceaccount:backup:backup-client"), "--namespace", "shop",
		"--service-account", "backup-client", "--client-namespace", "backup", "--address", f.address,
	}
}
