package cluster

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"strings"
	"time"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/cri"
)

// cniConfig gives each pod that does not use the node's network a link to the node. It
// takes a directory for the addresses that are given.
const cniConfig = `{"cniVersion": "1.0.0", "name": "pods", "plugins": [{"type": "ptp", "ipam":
{"type": "host-local", "dataDir": %q, "ranges": [[{"subnet": "10.89.0.0/16"}]]}}]}`

// containerd starts the node's container runtime, with the handlers runc and crust, and
// CrustVM where pods can have machines.
func (c *Cluster) containerd() *cri.Node {
	options := cri.Options{Handlers: map[string]string{Crust: c.crustRunc}}
	if c.VM != nil {
		options.Handlers[CrustVM] = c.VM.Program
		options.Env, options.Others = c.VM.Env(), c.VM.IsMachine
	}
	node := cri.New(c.t, options)
	check.Must(c.t, os.MkdirAll(node.Dir+"/cni", 0o700))
	config := fmt.Sprintf(cniConfig, node.Dir+"/addresses")
	check.Must(c.t, os.WriteFile(node.Dir+"/cni/10-pods.conflist", []byte(config), 0o600))
	return node
}

// KubeletRoot is kubelet's directory. It is the default one: a tmpfs covers the machine's.
const KubeletRoot = "/var/lib/kubelet"

// NodeName is the only node's.
const NodeName = "node-1"

// Most pods that the node takes.
const maxPods = 300

// kubeletConfig takes socket of containerd, control group and the authority.
const kubeletConfig = `apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
address: 0.0.0.0
port: 10250
healthzBindAddress: 127.0.0.1
healthzPort: 10248
authentication:
  anonymous: {enabled: false}
  webhook: {enabled: false}
  x509: {clientCAFile: %[3]q}
authorization: {mode: AlwaysAllow}
containerRuntimeEndpoint: "unix://%[1]s"
cgroupDriver: cgroupfs
cgroupRoot: %[2]s
failCgroupV1: false
failSwapOn: false
makeIPTablesUtilChains: false
featureGates: {CSIVolumeHealth: true}
resolvConf: ""
# Often, so that tests need not wait.
volumeStatsAggPeriod: 10s
syncFrequency: 5s
nodeStatusUpdateFrequency: 5s
# Tests start many pods at once, and read events.
maxPods: %[4]d
kubeAPIQPS: 500
kubeAPIBurst: 1000
eventRecordQPS: 0
imageGCHighThresholdPercent: 100
imageGCLowThresholdPercent: 99
evictionHard: {memory.available: 50Mi, nodefs.available: "1%%", imagefs.available: "1%%"}
volumePluginDir: ` + KubeletRoot + `/volume-plugins
`

// kubelet is the real one, with the rights of a node.
func (c *Cluster) kubelet() *rig.Process {
	for _, dir := range []string{KubeletRoot + "/plugins", KubeletRoot + "/plugins_registry"} {
		check.Must(c.t, os.MkdirAll(dir, 0o750))
	}
	config := fmt.Sprintf(kubeletConfig, c.Containerd.Socket, c.group, c.authority.file(), maxPods)
	file := c.Dir + "/kubelet.yaml"
	check.Must(c.t, os.WriteFile(file, []byte(config), 0o600))
	c.NodeAccess = c.NodeKubeconfig(NodeName)
	p := c.process("kubelet", "--config="+file, "--kubeconfig="+c.NodeAccess, "--root-dir="+KubeletRoot,
		"--hostname-override="+NodeName, "--node-ip="+NodeAddress, "--v=2")
	p.Ready = healthz
	return p
}

// healthz tells whether kubelet serves.
func healthz() error {
	client := http.Client{Timeout: time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	reply, err := client.Get("http://" + net.JoinHostPort("127.0.0.1", "10248") + "/healthz")
	if err != nil {
		return err
	}
	defer func() { _ = reply.Body.Close() }()
	if reply.StatusCode != http.StatusOK {
		return errors.New(reply.Status)
	}
	return nil
}

// Runtime classes.
const (
	Crust   = "crust"
	Runc    = ""         // what pods get that ask for nothing
	CrustVM = "crust-vm" // a handler, for which tests make the class
)

// objects are what an administrator makes once.
func objects() string {
	var out strings.Builder
	fmt.Fprintf(&out, "apiVersion: node.k8s.io/v1\nkind: RuntimeClass\nmetadata: {name: %s}\nhandler: %s\n", Crust, Crust)
	fmt.Fprint(&out, "---\napiVersion: node.k8s.io/v1\nkind: RuntimeClass\nmetadata: {name: runc}\nhandler: runc\n")
	for _, name := range []string{Block, Native, Plain} {
		fmt.Fprintf(&out, `---
apiVersion: storage.k8s.io/v1
kind: CSIDriver
metadata: {name: %[1]s}
spec:
  attachRequired: false
  podInfoOnMount: %[2]t
  fsGroupPolicy: File
  volumeLifecycleModes: [Persistent, Ephemeral]
---
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: {name: %[1]s}
provisioner: %[1]s
reclaimPolicy: Retain
allowVolumeExpansion: true
`, name, name != Block)
	}
	return out.String()
}
