package cluster

import (
	"bytes"
	"context"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/clientcmd/api"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// callTime ends every call to an API server, and every script in a pod, that hangs: for longer than another test has sync(2) hang.
const callTime = 3 * time.Minute

// ControlPlane is etcd and a kube-apiserver with Node and RBAC authorization and
// NodeRestriction. It needs no root, and no node.
type ControlPlane struct {
	// Dir holds everything of it.
	Dir string
	// URL is the API server's, Admin and AdminKubeconfig are the access of system:masters.
	URL             string
	Admin           *rest.Config
	AdminKubeconfig string
	Client          kubernetes.Interface

	Etcd, APIServer *rig.Process

	t         rig.T
	programs  string
	authority *authority
}

// StartControlPlane starts a control plane that goes with the test. Nothing binds
// claims or makes service accounts there, and none is asked for.
func StartControlPlane(t rig.T) *ControlPlane {
	t.Helper()
	rig.Need(t, "go")
	c := newControlPlane(t, t.TempDir(), "--disable-admission-plugins=ServiceAccount")
	check.Must(t, c.start())
	return c
}

// newControlPlane lays out a control plane.
func newControlPlane(t rig.T, dir string, flags ...string) *ControlPlane {
	t.Helper()
	programs := check.Value(Programs())(t)
	c := &ControlPlane{Dir: dir, t: t, programs: programs}
	c.authority = check.Value(newAuthority(dir))(t)
	ports := freePorts(t, 3)
	c.URL = "https://127.0.0.1:" + ports[0]
	c.AdminKubeconfig = c.Kubeconfig("admin", "system:masters")
	c.Admin = check.Value(restConfig(c.AdminKubeconfig))(t)
	c.Client = check.Value(kubernetes.NewForConfig(c.Admin))(t)
	c.Etcd = c.etcd("http://127.0.0.1:"+ports[1], "http://127.0.0.1:"+ports[2])
	c.APIServer = c.apiServer(ports[0], "http://127.0.0.1:"+ports[1], flags)
	t.Cleanup(func() {
		c.APIServer.Kill()
		c.Etcd.Kill()
		if t.Failed() {
			t.Logf("log of the API server:\n%s", rig.Tail(c.APIServer.Log()))
		}
	})
	return c
}

func (c *ControlPlane) start() error {
	// The API server waits for etcd by itself.
	if err := errors.Join(c.Etcd.Launch(), c.APIServer.Start()); err != nil {
		return fmt.Errorf("%w\nlog of etcd:\n%s", err, rig.Tail(c.Etcd.Log()))
	}
	return nil
}

// process is one of Kubernetes' programs.
func (c *ControlPlane) process(name string, args ...string) *rig.Process {
	return &rig.Process{Name: name, Program: filepath.Join(c.programs, name), Args: args, LogFile: c.Dir + "/" + name + ".log"}
}

func (c *ControlPlane) controllers() (manager, scheduler *rig.Process) {
	manager = c.process("kube-controller-manager", "--kubeconfig="+c.Kubeconfig("system:kube-controller-manager", "system:masters"),
		"--leader-elect=false", "--secure-port=0", "--service-account-private-key-file="+c.Dir+"/service-accounts.pem",
		"--root-ca-file="+c.authority.file(), "--use-service-account-credentials=false", "--pvclaimbinder-sync-period=2s")
	return manager, c.process("kube-scheduler", "--kubeconfig="+c.Kubeconfig("system:kube-scheduler"), "--leader-elect=false", "--secure-port=0")
}

func (c *ControlPlane) etcd(client, peer string) *rig.Process {
	return c.process("etcd", "--data-dir="+c.Dir+"/etcd", "--log-level=warn", "--unsafe-no-fsync",
		"--listen-client-urls="+client, "--advertise-client-urls="+client,
		"--listen-peer-urls="+peer, "--initial-advertise-peer-urls="+peer, "--initial-cluster=default="+peer)
}

// NodeAddress is what the cluster's only node has, and its pods: they use the node's
// network. Kubelet takes no address of the loopback.
const NodeAddress = "10.88.0.1"

func (c *ControlPlane) apiServer(port, etcd string, flags []string) *rig.Process {
	address := net.IPv4(127, 0, 0, 1)
	serving := c.issue("apiserver", pkix.Name{CommonName: "kube-apiserver"}, address, net.ParseIP(gateway))
	caller := c.issue("apiserver-kubelet-client", pkix.Name{CommonName: "kube-apiserver", Organization: []string{"system:masters"}})
	// Tokens are signed with a key that its public half is read from, too.
	tokens := c.issue("service-accounts", pkix.Name{CommonName: "service-accounts"})
	p := c.process("kube-apiserver", append([]string{
		"--etcd-servers=" + etcd, "--bind-address=" + address.String(), "--secure-port=" + port,
		"--advertise-address=" + NodeAddress, "--endpoint-reconciler-type=none", "--service-cluster-ip-range=10.96.0.0/16",
		"--tls-cert-file=" + serving, "--tls-private-key-file=" + serving, "--client-ca-file=" + c.authority.file(),
		"--kubelet-client-certificate=" + caller, "--kubelet-client-key=" + caller, "--kubelet-preferred-address-types=InternalIP",
		"--service-account-issuer=https://kubernetes.default.svc",
		"--service-account-key-file=" + tokens, "--service-account-signing-key-file=" + tokens,
		"--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction", "--allow-privileged=true",
		"--feature-gates=CSIVolumeHealth=true",
	}, flags...)...)
	if Beta { // MutatingAdmissionPolicy is on by default since 1.36
		p.Args = append(p.Args, "--feature-gates=MutatingAdmissionPolicy=true", "--runtime-config=admissionregistration.k8s.io/v1beta1=true")
	}
	p.Ready = c.readyz
	p.Grace = 5 * time.Second // it waits a minute for requests that hang
	return p
}

// readyz tells whether the API server serves, with the namespace that tests use.
func (c *ControlPlane) readyz() error {
	ctx := context.Background()
	if err := c.Client.CoreV1().RESTClient().Get().AbsPath("/readyz").Do(ctx).Error(); err != nil {
		return err
	}
	_, err := c.Client.CoreV1().Namespaces().Get(ctx, metav1.NamespaceDefault, metav1.GetOptions{})
	return err
}

// freePorts gives ports of the loopback that nobody had a moment ago. The kernel gives them to nobody: its own are
// above 32767.
func freePorts(t rig.T, count int) (ports []string) {
	for tries := 0; len(ports) < count; tries++ {
		port := strconv.Itoa(10000 + rand.IntN(22000)) //nolint:gosec // no secret
		listener, err := net.Listen("tcp", "127.0.0.1:"+port)
		if err != nil && tries < 100 {
			continue
		}
		check.Must(t, err)
		defer func() { _ = listener.Close() }()
		ports = append(ports, port)
	}
	return ports
}

// issue writes a certificate with its key into one file, and gives its path.
func (c *ControlPlane) issue(file string, subject pkix.Name, addresses ...net.IP) string {
	c.t.Helper()
	return check.Value(c.authority.issue(file, subject, addresses...))(c.t)
}

// Kubeconfig makes a kubeconfig for an identity of its own, and gives its path.
// The certificate is beside it, in one file with its key, as kubelet keeps its own.
func (c *ControlPlane) Kubeconfig(user string, groups ...string) string {
	c.t.Helper()
	file := strings.NewReplacer(":", "-", "/", "-").Replace(user)
	certificate := c.issue(file, pkix.Name{CommonName: user, Organization: groups})
	return check.Value(c.kubeconfig(file, &api.AuthInfo{ClientCertificate: certificate, ClientKey: certificate}))(c.t)
}

// kubeconfig writes a kubeconfig for one identity, and gives its path.
func (c *ControlPlane) kubeconfig(name string, identity *api.AuthInfo) (string, error) {
	config := api.NewConfig()
	config.Clusters["test"] = &api.Cluster{Server: c.URL, CertificateAuthority: c.authority.file()}
	config.AuthInfos[name] = identity
	config.Contexts["test"] = &api.Context{Cluster: "test", AuthInfo: name}
	config.CurrentContext = "test"
	path := c.Dir + "/" + name + ".kubeconfig"
	return path, clientcmd.WriteToFile(*config, path)
}

// NodeKubeconfig makes the kubeconfig that kubelet has on a node of that name.
func (c *ControlPlane) NodeKubeconfig(node string) string {
	c.t.Helper()
	return c.Kubeconfig("system:node:"+node, "system:nodes")
}

// restConfig reads a kubeconfig. Tests are not slowed down.
func restConfig(path string) (*rest.Config, error) {
	config, err := clientcmd.BuildConfigFromFlags("", path)
	if err != nil {
		return nil, err
	}
	config.QPS, config.Timeout = -1, callTime
	return config, nil
}

// Kubectl runs kubectl as admin and gives what it wrote; its words are in the error where it failed.
func (c *ControlPlane) Kubectl(args ...string) (string, error) { return c.kubectl("", args) }

// Apply applies manifests.
func (c *ControlPlane) Apply(yaml string) error {
	_, err := c.kubectl(yaml, []string{"apply", "-f", "-"})
	return err
}

func (c *ControlPlane) kubectl(input string, args []string) (string, error) {
	all := append([]string{"--kubeconfig=" + c.AdminKubeconfig, "--cache-dir=" + c.Dir + "/kubectl"}, args...)
	cmd := exec.Command(filepath.Join(c.programs, "kubectl"), all...)
	var out, complaints bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(input), &out, &complaints
	if err := cmd.Run(); err != nil {
		return out.String(), fmt.Errorf("kubectl %s: %w: %s", strings.Join(args, " "), err, complaints.String())
	}
	return out.String(), nil
}
