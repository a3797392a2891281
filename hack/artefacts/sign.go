package main

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

const (
	sumsFile      = "SHA256SUMS"
	bundleSuffix  = ".sigstore.json"
	statementType = "https://in-toto.io/Statement/v1"
	payloadType   = "application/vnd.in-toto+json"
)

// bundle is sigstore's bundle, version 0.3, with a key instead of a certificate: of a blob, or of
// a statement in a DSSE envelope.
type bundle struct {
	MediaType string `json:"mediaType"`
	Material  struct {
		PublicKey struct {
			Hint string `json:"hint"`
		} `json:"publicKey"`
	} `json:"verificationMaterial"`
	Message  *messageSignature `json:"messageSignature,omitempty"`
	Envelope *envelope         `json:"dsseEnvelope,omitempty"`
}

type messageSignature struct {
	Digest struct {
		Algorithm string `json:"algorithm"`
		Digest    []byte `json:"digest"`
	} `json:"messageDigest"`
	Signature []byte `json:"signature"`
}

type envelope struct {
	Payload     []byte          `json:"payload"`
	PayloadType string          `json:"payloadType"`
	Signatures  []dsseSignature `json:"signatures"`
}

type dsseSignature struct {
	Sig []byte `json:"sig"`
}

// preAuth is what a DSSE envelope's signature is of.
func (e *envelope) preAuth() []byte {
	return fmt.Appendf(nil, "DSSEv1 %d %s %d %s", len(e.PayloadType), e.PayloadType, len(e.Payload), e.Payload)
}

func makeKey(path string) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return err
	}
	public, err := x509.MarshalPKIXPublicKey(key.Public())
	if err != nil {
		return err
	}
	return errors.Join(
		os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: private}), 0o600),      //nolint:gosec // where the caller wants it
		os.WriteFile(path+".pub", pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: public}), 0o644), //nolint:gosec // public
	)
}

// readKey reads a key of PEM: the private key, or with public, the public one.
func readKey(path string, public bool) (any, error) {
	raw, err := os.ReadFile(path) //nolint:gosec // the caller's key
	if err != nil {
		return nil, err
	}
	block, _ := pem.Decode(raw)
	if block == nil {
		return nil, fmt.Errorf("%s is not PEM", path)
	}
	if public {
		return x509.ParsePKIXPublicKey(block.Bytes)
	}
	return x509.ParsePKCS8PrivateKey(block.Bytes)
}

// sign signs files: beside each bundle, cosign's older form of a signature lies in FILE.sig.
func sign(keyFile string, files []string) error {
	parsed, err := readKey(keyFile, false)
	if err != nil {
		return err
	}
	key, is := parsed.(*ecdsa.PrivateKey)
	if !is || key.Curve != elliptic.P256() {
		return fmt.Errorf("%s is no ECDSA key on P-256", keyFile)
	}
	for _, file := range files {
		content, err := os.ReadFile(file) //nolint:gosec // of the release
		if err != nil {
			return err
		}
		signed, err := signContent(key, content)
		if err != nil {
			return err
		}
		raw, err := json.Marshal(signed)
		if err != nil {
			return err
		}
		if err := os.WriteFile(file+bundleSuffix, append(raw, '\n'), 0o644); err != nil { //nolint:gosec // public
			return err
		}
		if signed.Message == nil {
			continue
		}
		old := base64.StdEncoding.EncodeToString(signed.Message.Signature) + "\n"
		if err := os.WriteFile(file+".sig", []byte(old), 0o644); err != nil { //nolint:gosec // public
			return err
		}
	}
	return nil
}

func signContent(key *ecdsa.PrivateKey, content []byte) (*bundle, error) {
	public, err := x509.MarshalPKIXPublicKey(key.Public())
	if err != nil {
		return nil, err
	}
	hint := sha256.Sum256(public)
	b := &bundle{MediaType: "application/vnd.dev.sigstore.bundle.v0.3+json"}
	b.Material.PublicKey.Hint = base64.StdEncoding.EncodeToString(hint[:])
	signed := content
	if isStatement(content) {
		b.Envelope = &envelope{Payload: content, PayloadType: payloadType}
		signed = b.Envelope.preAuth()
	}
	digest := sha256.Sum256(signed)
	signature, err := key.Sign(rand.Reader, digest[:], crypto.SHA256)
	if err != nil {
		return nil, err
	}
	if b.Envelope != nil {
		b.Envelope.Signatures = []dsseSignature{{signature}}
		return b, nil
	}
	b.Message = &messageSignature{Signature: signature}
	b.Message.Digest.Algorithm, b.Message.Digest.Digest = "SHA2_256", digest[:]
	return b, nil
}

func isStatement(content []byte) bool {
	var s statement
	return json.Unmarshal(content, &s) == nil && s.Type == statementType
}

// verify checks a directory: all its files are in SHA256SUMS, as they are, and the sums and the
// provenance, which names the same files, are signed with the key.
func verify(keyFile, dir string) error {
	parsed, err := readKey(keyFile, true)
	if err != nil {
		return err
	}
	key, is := parsed.(*ecdsa.PublicKey)
	if !is {
		return fmt.Errorf("%s is no ECDSA key", keyFile)
	}
	sums, err := verifySums(dir)
	if err != nil {
		return err
	}
	if _, err := verifyBundle(key, filepath.Join(dir, sumsFile)); err != nil {
		return err
	}
	statements, err := filepath.Glob(filepath.Join(dir, "*.intoto.json"))
	if err != nil || len(statements) != 1 {
		return fmt.Errorf("%s has %d provenances, want one", dir, len(statements))
	}
	payload, err := verifyBundle(key, statements[0])
	if err != nil {
		return err
	}
	return matches(payload, sums)
}

// verifyBundle checks the signature of a file and returns what is signed.
func verifyBundle(key *ecdsa.PublicKey, file string) ([]byte, error) {
	content, err := os.ReadFile(file) //nolint:gosec // the caller's
	if err != nil {
		return nil, err
	}
	raw, err := os.ReadFile(file + bundleSuffix) //nolint:gosec // the caller's
	if err != nil {
		return nil, err
	}
	var b bundle
	if err := json.Unmarshal(raw, &b); err != nil {
		return nil, fmt.Errorf("%s%s: %w", file, bundleSuffix, err)
	}
	signed, signature := content, []byte(nil)
	switch {
	case b.Envelope != nil && len(b.Envelope.Signatures) == 1 && bytes.Equal(b.Envelope.Payload, content):
		signed, signature = b.Envelope.preAuth(), b.Envelope.Signatures[0].Sig
	case b.Message != nil:
		signature = b.Message.Signature
	}
	digest := sha256.Sum256(signed)
	if !ecdsa.VerifyASN1(key, digest[:], signature) {
		return nil, fmt.Errorf("%s: the signature is not of this file and key", file)
	}
	return content, nil
}

func verifySums(dir string) (map[string]string, error) {
	sums, err := readSums(filepath.Join(dir, sumsFile))
	if err != nil {
		return nil, err
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	there := 0
	for _, entry := range entries {
		name := entry.Name()
		if strings.HasPrefix(name, sumsFile) || strings.Contains(name, ".intoto.json") || strings.HasSuffix(name, ".pub") {
			continue
		}
		there++
		content, err := os.ReadFile(filepath.Join(dir, name)) //nolint:gosec // the caller's
		if err != nil {
			return nil, err
		}
		if sum := sha256.Sum256(content); sums[name] != hex.EncodeToString(sum[:]) {
			return nil, fmt.Errorf("%s is not what %s says: %q", name, sumsFile, sums[name])
		}
	}
	if there != len(sums) || there == 0 {
		return nil, fmt.Errorf("%s has %d files, and there are %d", sumsFile, len(sums), there)
	}
	return sums, nil
}
