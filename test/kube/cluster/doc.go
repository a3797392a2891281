// Package cluster is a real Kubernetes for tests.
//
// # A control plane
//
// StartControlPlane starts etcd and a kube-apiserver for one test, in three seconds
// and without root. It is enough for rights, policies and everything else that is
// decided before a node has a pod.
//
// # A cluster of one node
//
// Kubelet, kube-controller-manager, kube-scheduler, containerd with the runtime handlers
// runc and crust, crust-proxy, and three CSI drivers run beside it. All tests of a binary
// share one cluster, in namespaces of their own; a package has it by
//
//	func TestMain(m *testing.M) { os.Exit(cluster.Main(m)) }
//
// and a test by
//
//	k := cluster.On(t)
//	v := k.NewVolume(cluster.VolumeOptions{Name: "data", Driver: cluster.Block})
//	p := k.NewPod("writer", cluster.Crust).With(v, "/data").Start()
//	p.Exec("echo hello > /data/file")
//	p.Delete()
//
// or cluster.Beside(t), where it takes nothing away: such tests run together.
//
// What a test makes goes with it. Then all that it has stopped is started again, and
// the test fails where anything of pods and volumes is left on the node: records,
// directories, mounts, loop devices, processes. What the tests together have left
// on the machine fails the binary.
//
// # Parts that go away
//
// Every component is a Process: Stop asks it to end, Kill
// kills it, Start waits until it serves again, Launch does not wait. Pod.Exec goes
// by neither kubelet nor the API server, and so tells what a container sees while
// they are away. The drivers' registrars are sidecars of their own, in the test's
// process.
//
// # What is not real
//
// Registrars are played. No CSI sidecars run unless a test asks for them (StartSidecars):
// NewVolume does what external-provisioner does, Volume.Grow what external-resizer does.
// No volume needs to be attached. Pods use the node's network unless a test asks for one
// of their own. Kubelet's root and its logs are on tmpfs, and so are the drivers' images.
package cluster
