//go:build system

package cluster

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"time"
)

// KubeletRoot is kubelet's directory. It is the default one: a tmpfs covers the
// machine's.
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
func (c *Cluster) kubelet() (*Process, error) {
	for _, dir := range []string{KubeletRoot + "/plugins", KubeletRoot + "/plugins_registry"} {
		if err := os.MkdirAll(dir, 0o750); err != nil {
			return nil, err
		}
	}
	config := fmt.Sprintf(kubeletConfig, c.Containerd.node.Socket, c.group, c.authority.file(), maxPods)
	file := c.Dir + "/kubelet.yaml"
	if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
		return nil, err
	}
	var err error
	if c.NodeAccess, err = c.NodeKubeconfig(NodeName); err != nil {
		return nil, err
	}
	p := c.process("kubelet", "--config="+file, "--kubeconfig="+c.NodeAccess, "--root-dir="+KubeletRoot,
		"--hostname-override="+NodeName, "--node-ip="+nodeAddress, "--v=2")
	p.ready = healthz
	return p, nil
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
